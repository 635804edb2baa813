"""What a round needs from the rest of the node: small protocols, so that `rl.sapo` reads like the paper.

`rl.sapo` knows nothing of torch, processes or sockets; `node.daemon` hands it the real things and tests hand it small
ones.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from rl.rollouts import RolloutGroup, Sampling, ScoredGroup, UpdateStats
from rl.selection import Candidate
from verifiers.base import Task


class Learner(Protocol):
    """The policy and its engine, in another process."""

    async def generate(self, tasks: Sequence[Task], sampling: Sampling, seed: int) -> list[RolloutGroup]:
        """Sample a group for each task, in order. A task that does not fit the model is left out."""
        ...

    async def generate_ahead(self, tasks: Sequence[Task], sampling: Sampling, seed: int) -> None:
        """Begin what `generate` does. An engine that can do so goes on with it beside all that comes then, but for the
        last of an update; any other has done it on return.
        """
        ...

    async def generated_ahead(self) -> tuple[list[RolloutGroup], float]:
        """The groups of what was begun last, and the seconds that sampling took."""
        ...

    async def fits(self, groups: Sequence[ScoredGroup]) -> list[bool]:
        """Whether each of these groups of others can be trained on by this model: see `rl.learner.Learner.fits`."""
        ...

    async def update(self, groups: Sequence[ScoredGroup], seed: int) -> UpdateStats:
        """One learning step on these groups. Raises TrainingError if it failed and left the policy as it was."""
        ...


class TaskSource(Protocol):
    """An endless stream of tasks of this node's own."""

    async def draw(self, count: int) -> list[Task]:
        """The next `count` tasks, none of them held out."""
        ...

    @property
    def cursor(self) -> Mapping[str, int]:
        """Where the stream stands, behind the tasks that were drawn last."""
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

    async def candidates(self, since: int, reuse: int) -> list[Candidate]:
        """Informative groups of others that came in round `since` or later and that fewer than `reuse` rounds have
        trained on, oldest first, without those that were refused.
        """
        ...

    async def take(self, ids: Collection[int]) -> dict[int, ScoredGroup]:
        """The groups of these candidates, by id, without any that have gone meanwhile."""
        ...

    async def settle(self, used: Collection[int], refused: Collection[int], number: int) -> None:
        """Note that `used` are trained on in round `number`, and that `refused` are to be no candidates again."""
        ...


class Swarm(Protocol):
    """The other nodes."""

    async def share(self, groups: Sequence[ScoredGroup], number: int, /) -> int:
        """Send these own groups of round `number` to whoever listens. Returns in how many batches they went.

        Never waits for others and does not fail for lack of them.
        """
        ...
