"""Small stand-ins for what admission works with."""

from collections.abc import Callable, Sequence

import trio

from p2p.reasons import Reason
from rl.rollouts import ScoredGroup
from verifiers.base import NoSuchTask, Task, TaskRef, UnknownTask, VerifierError, is_held_out
from verifiers.sandbox import SandboxError


class FakeTasks:
    """The verifier `fake`: the prompt is `question <index>`, "right" is right, and a configuration `do <what>` does it.

    `seconds` is how long scoring a group takes.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.scored: list[str] = []

    async def make(self, ref: TaskRef) -> Task:
        failures: dict[str, type[VerifierError]] = {
            "unknown": UnknownTask,
            "none": NoSuchTask,
            "fail": VerifierError,
            "ill": SandboxError,
        }
        await trio.lowlevel.checkpoint()
        if ref.verifier not in ("fake", "command"):
            raise UnknownTask(ref.verifier)
        if (failure := failures.get(ref.config.removeprefix("do "))) is not None:
            raise failure("as it was told")
        return Task(ref, "fake", f"question {ref.index}", "right")

    async def score(self, task: Task, completions: Sequence[str]) -> list[float]:
        self.scored.append(task.prompt)
        await trio.sleep(float("inf") if task.ref.config == "do hang" else self.seconds)
        return [float(text == "right") for text in completions]


class FakePool:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.groups: list[ScoredGroup] = []

    async def add(self, groups: Sequence[ScoredGroup]) -> None:
        await trio.lowlevel.checkpoint()
        self.groups += groups

    def prompts(self, origin: str) -> list[str]:
        return [one.group.task.prompt for one in self.groups if one.origin == origin]


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self, time: float) -> None:
        self.time = time

    def __call__(self) -> float:
        return self.time


def numbers(held_out: bool = False) -> Callable[[int], list[int]]:
    """The first so many indices whose questions are, or are not, held out."""

    def first(count: int) -> list[int]:
        found: list[int] = []
        index = 0
        while len(found) < count:
            if is_held_out(f"question {index}") == held_out:
                found.append(index)
            index += 1
        return found

    return first


def only(counter: dict[Reason, int]) -> tuple[Reason, int]:
    """The one reason that was counted, and how often."""
    ((reason, count),) = counter.items()
    return reason, count
