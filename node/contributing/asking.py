"""Programs and models that answer: each task is put to them L times, as a node samples its own policy."""

from collections.abc import Callable
from typing import Protocol

import trio

from node.contributing.answers import NoAnswer
from node.contributing.desk import Desk, Question
from node.errors import NodeError
from node.text import clean
from rl.nurseries import unwrapped
from verifiers.base import Task

IN_VAIN = 3
"""Tasks one after the other without any answer until it is given up."""


class Source(Protocol):
    """Somebody who answers without being looked at."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    async def answer(self, task: Task, sample: int) -> tuple[bytes | str, bool]:
        """Answer number `sample` (0 to L - 1) to a task, and whether it came to its end.

        Raises NoAnswer if there is none this time, another NodeError if there will never be one.
        """
        ...


class GivenUp(NodeError):
    """Nothing has answered for too long."""


async def ask(desk: Desk, source: Source, tasks: int | None, at_once: int, say: Callable[[str, str], None]) -> None:
    """Have `source` answer tasks, so many or without end, with `at_once` answers in the making.

    Raises GivenUp, or what the source raises if it cannot go on; VerifierError.
    """
    number = in_vain = 0
    while tasks is None or number < tasks:
        if desk.full:
            say("warning", f"{desk.waiting} groups wait for a node to send them to: waiting with them")
            await desk.room()
        question = await desk.draw()
        failures = await _answers(desk, source, question, at_once)
        shared = await desk.finish(question)
        number += 1
        in_vain = 0 if question.answers else in_vain + 1
        if in_vain == IN_VAIN:
            raise GivenUp(f"{IN_VAIN} tasks in a row got no answer. The last time: {failures[-1]}")
        if failures:
            say("warning", f"{len(failures)} of {desk.samples} answers are none: {failures[-1]}")
        say("info", _told(question, shared))


async def _answers(desk: Desk, source: Source, question: Question, at_once: int) -> list[NoAnswer]:
    """Let it answer L times; returns what failed."""
    failures: list[NoAnswer] = []
    limit = trio.CapacityLimiter(at_once)

    async def one(sample: int) -> None:
        async with limit:
            try:
                said, finished = await source.answer(question.task, sample)
                await desk.answer(question, said, finished)
            except NoAnswer as error:
                failures.append(error)

    with unwrapped():
        async with trio.open_nursery() as nursery:
            for sample in range(desk.samples):
                nursery.start_soon(one, sample)
    return failures


def _told(question: Question, shared: bool) -> str:
    rewards = [reward for reward, _ in question.answers.values()]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    what = "kept, to be sent" if shared else "nothing to learn from it: not sent"
    return f"{clean(question.task.kind)}: {len(rewards)} different answers, mean reward {mean:.2f}; {what}"
