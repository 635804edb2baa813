"""What a round needs from the rest of the node: small protocols, so that `rl.sapo` reads like the paper.

`rl.sapo` knows nothing of torch, processes or sockets; `node.daemon` hands it the real things and tests hand it small
ones.
"""

from collections.abc import Sequence
from typing import Protocol

from rl.rollouts import RolloutGroup, Sampling, ScoredGroup, UpdateStats
from verifiers.base import Task


class Learner(Protocol):
    """The policy and its engine, in another process."""

    async def generate(self, tasks: Sequence[Task], sampling: Sampling, seed: int) -> list[RolloutGroup]:
        """Sample a group for each task, in order. A task that does not fit the model is left out."""
        ...

    async def update(self, groups: Sequence[ScoredGroup], seed: int) -> UpdateStats:
        """One learning step on these groups. Raises TrainingError if it failed and left the policy as it was."""
        ...


class TaskSource(Protocol):
    """An endless stream of tasks of this node's own."""

    async def draw(self, count: int) -> list[Task]:
        """The next `count` tasks, none of them held out."""
        ...


class Scorer(Protocol):
    """This node's own verifiers."""

    async def score(self, task: Task, completions: Sequence[str]) -> list[float]:
        """A reward in [0, 1] for each completion of `task`. Raises VerifierError."""
        ...


class Pool(Protocol):
    """Scored groups, this node's and others'."""

    async def add(self, groups: Sequence[ScoredGroup]) -> None:
        """Keep these groups; returns when they are safe."""
        ...
