"""What a group that somebody else made passes before it may be learned from, whoever brought it here.

Nothing of it is believed: its task is made anew from the reference, its prompt compared, its answers scored here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from p2p.reasons import Reason
from p2p.wire import WireGroup
from verifiers.base import NoSuchTask, Task, TaskRef, UnknownTask, VerifierError
from verifiers.registry import COMMAND
from verifiers.sandbox import SandboxError

GROUP_SECONDS = 60.0
"""Limit on making and scoring one group, whatever the limits on its answers add up to."""


class Tasks(Protocol):
    """Makes and scores tasks: a `verifiers.sandbox.Sandbox`."""

    async def make(self, ref: TaskRef) -> Task:
        """The task that `ref` names. Raises VerifierError."""
        ...

    async def score(self, task: Task, completions: Sequence[str]) -> list[float]:
        """A reward in [0, 1] for each completion. Raises VerifierError."""
        ...


@dataclass(frozen=True, slots=True)
class Verified:
    """The task as this node made it, and a reward of its own for each answer."""

    task: Task
    rewards: tuple[float, ...]


async def verify(
    group: WireGroup, tasks: Tasks, max_completion: int, own_task: Callable[[TaskRef], bool]
) -> Verified | Reason:
    """This node's own task and rewards for a group, or why it is refused.

    `own_task` says whether a reference is one that this node's own mix makes, seed and index aside: the programs of the
    verifier `command` run for no other ones. Raises SandboxError, this machine's own trouble.
    """
    texts = [completion.text for completion in group.completions]
    if max(map(len, texts)) > max_completion:
        return Reason.TOO_LONG
    if group.ref.verifier == COMMAND and not own_task(group.ref):
        return Reason.UNKNOWN_TASK
    try:
        with trio.move_on_after(GROUP_SECONDS):
            return await _scored(group, tasks, texts)
        return Reason.UNSCORABLE
    except SandboxError:
        raise
    except UnknownTask:
        return Reason.UNKNOWN_TASK
    except NoSuchTask:
        return Reason.NO_SUCH_TASK
    except VerifierError:
        # The owner's program, asked what this node asks it too: what fails is here.
        return Reason.OVERLOADED if group.ref.verifier == COMMAND else Reason.UNSCORABLE


async def _scored(group: WireGroup, tasks: Tasks, texts: list[str]) -> Verified | Reason:
    task = await tasks.make(group.ref)
    if task.prompt != group.prompt:
        return Reason.WRONG_PROMPT
    if task.held_out:
        return Reason.HELD_OUT
    return Verified(task, tuple(await tasks.score(task, texts)))
