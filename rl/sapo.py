"""The round of SAPO (arXiv 2509.08721, section 3, Algorithm 1): draw - generate - score - update.

This node trains on its own rollouts alone: I local groups a round and J = 0.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import trio

from rl.advantage import advantages
from rl.errors import TrainingError
from rl.protocols import Learner, Pool, Scorer, TaskSource
from rl.rollouts import RolloutGroup, Sampling, ScoredGroup, UpdateStats
from verifiers.base import VerifierError

Phase = Literal["draw", "generate", "score", "update"]


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What stays the same from round to round.

    `origin` is this node's id, `local` is I, and `seed` fixes all sampling: round r of two runs with one seed draws,
    samples and shuffles alike, so a round done again after a crash is the same round.
    """

    origin: str
    local: int
    sampling: Sampling
    advantage: Literal["group", "mean"]
    seed: int


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a finished round leaves behind. Seconds are wall-clock time.

    `unscored` counts groups that were sampled and that the verifiers could not score. `stats` is None if the learning
    step failed, which left the policy as it was; `problem` says how.
    """

    number: int
    local: tuple[ScoredGroup, ...]
    unscored: int
    stats: UpdateStats | None
    problem: str
    seconds_generate: float
    seconds_score: float
    seconds_update: float

    @property
    def reward_local(self) -> float:
        """Mean reward of the completions this node sampled itself in this round."""
        return sum(group.mean_reward for group in self.local) / len(self.local)

    @property
    def informative_fraction(self) -> float:
        """Share of the local groups whose rewards differ."""
        return sum(group.informative for group in self.local) / len(self.local)

    @property
    def tokens_generated(self) -> int:
        """Tokens sampled in this round, EOS included."""
        return sum(len(c.tokens or ()) for scored in self.local for c in scored.group.completions)


class Sapo:
    """Runs rounds. `on_phase` is told which part of a round begins."""

    def __init__(
        self,
        plan: RoundPlan,
        learner: Learner,
        source: TaskSource,
        scorer: Scorer,
        pool: Pool,
        on_phase: Callable[[Phase], None],
    ) -> None:
        self._plan = plan
        self._learner = learner
        self._source = source
        self._scorer = scorer
        self._pool = pool
        self._on_phase = on_phase

    async def round(self, number: int) -> RoundResult:
        """One round. The update is its last step: if this is cancelled before, the policy is as it was."""
        plan = self._plan
        self._on_phase("draw")
        tasks = await self._source.draw(plan.local)

        self._on_phase("generate")
        begun = time.monotonic()
        rollouts = await self._learner.generate(tasks, plan.sampling, round_seed(plan.seed, number, "generate"))
        generated = time.monotonic()

        self._on_phase("score")
        local = await self._score(rollouts, number)
        scored = time.monotonic()
        await self._pool.add(local)

        self._on_phase("update")
        training = time.monotonic()
        stats, problem = None, ""
        try:
            stats = await self._learner.update(local, round_seed(plan.seed, number, "update"))
        except TrainingError as error:
            problem = str(error)
        return RoundResult(
            number=number,
            local=tuple(local),
            unscored=len(rollouts) - len(local),
            stats=stats,
            problem=problem,
            seconds_generate=generated - begun,
            seconds_score=scored - generated,
            seconds_update=time.monotonic() - training,
        )

    async def _score(self, rollouts: Sequence[RolloutGroup], number: int) -> list[ScoredGroup]:
        """This node's own rewards and the advantages inside each group, in the order of `rollouts`.

        A group that the verifiers fail on is left out. Raises VerifierError if they fail on all.
        """
        rewards: list[tuple[float, ...]] = [()] * len(rollouts)
        failures: list[VerifierError] = []

        async def score_one(place: int, group: RolloutGroup) -> None:
            texts = [completion.text for completion in group.completions]
            try:
                rewards[place] = tuple(await self._scorer.score(group.task, texts))
            except VerifierError as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            for place, group in enumerate(rollouts):
                nursery.start_soon(score_one, place, group)
        if len(failures) == len(rollouts):
            raise failures[0]
        return [
            ScoredGroup(group, self._plan.origin, number, reward, advantages(reward, self._plan.advantage))
            for group, reward in zip(rollouts, rewards, strict=True)
            if reward
        ]


def round_seed(seed: int, number: int, purpose: str) -> int:
    """A seed for one purpose of one round, below 2**63.

    Deriving it instead of carrying a generator's state along means that there is no such state to save or to lose.
    """
    digest = hashlib.sha256(f"{seed}/{number}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
