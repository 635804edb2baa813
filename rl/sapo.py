"""The round of SAPO (arXiv 2509.08721, section 3, Algorithm 1): draw - generate - score - share - mix - update.

Each node runs its rounds by itself and waits for nobody: a round without any group of others is a good round. Tasks
of the next round are drawn while this one samples. With `RoundPlan.overlap` its completions are sampled, too, while
this one is scored and shared, and where the engine can do that while it is trained on: by a policy that is one learning
step older than the one they train.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import trio

from rl.advantage import advantages
from rl.errors import TrainingError
from rl.nurseries import unwrapped
from rl.protocols import Learner, Pool, Scorer, Swarm, TaskSource
from rl.rollouts import RolloutGroup, Sampling, ScoredGroup, UpdateStats
from rl.selection import Room, Selection
from rl.sharing import Share, shared
from verifiers.base import Task, VerifierError

Phase = Literal["draw", "generate", "score", "share", "mix", "update"]

MAX_CHOICES = 8
"""How often a round chooses anew because of groups that do not fit the model. Those are remembered as such, so a pool
full of them costs every round a little until they are known, and no round much."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What stays the same from round to round.

    `origin` is this node's id, `local` is I, `external` is J, and `share` says which own groups others get. An external
    group is trained on within `max_age` rounds of its arrival, in at most `reuse` rounds; `per_peer` of the J places
    are for one origin at most (see `rl.selection.Room`). `seed` fixes all sampling: round r of two runs with one seed
    draws, samples, chooses and shuffles alike, so a round done again after a crash is the same round, as far as the
    same groups of others are there. Without `train` a round ends once it has shared.

    With `overlap` the next round is sampled beside this one. Its policy is then that before this round's update, except
    after a crash or a stop: what was sampled ahead is lost, and sampled again after the update.
    """

    origin: str
    local: int
    external: int
    share: Share
    max_age: int
    reuse: int
    per_peer: int
    sampling: Sampling
    advantage: Literal["group", "mean"]
    seed: int
    train: bool = True
    overlap: bool = False


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What a finished round leaves behind. Seconds are wall-clock time; `seconds_share` covers share and mix.
    `seconds_generate` may have gone by in the round before, and in `seconds_update` is what the learning step waited
    for the sampling of the next one.

    `external` are the groups of others that entered the update. `unscored` counts groups that were sampled and that the
    verifiers could not score. `stats` is None if the learning step failed, which left the policy as it was (`problem`
    says how), or if there was to be none. `first_used` counts, by origin, the external groups that were trained on and
    in no round before. `cursor` is where the task source stood behind the tasks of this round.
    """

    number: int
    local: tuple[ScoredGroup, ...]
    external: tuple[ScoredGroup, ...]
    unscored: int
    batches_sent: int
    stats: UpdateStats | None
    problem: str
    seconds_generate: float
    seconds_score: float
    seconds_share: float
    seconds_update: float
    first_used: Mapping[str, int] = field(default_factory=dict)
    cursor: Mapping[str, int] = field(default_factory=dict)

    @property
    def reward_local(self) -> float:
        """Mean reward of the groups this node sampled itself in this round."""
        return _mean_reward(self.local)

    @property
    def reward_external(self) -> float | None:
        """Mean reward, by this node's own verifiers, of the external groups; None if there were none."""
        return _mean_reward(self.external) if self.external else None

    @property
    def informative_fraction(self) -> float:
        """Share of the local groups whose rewards differ."""
        return sum(group.informative for group in self.local) / len(self.local)

    @property
    def tokens_generated(self) -> int:
        """Tokens sampled in this round, EOS included."""
        return sum(len(c.tokens or ()) for scored in self.local for c in scored.group.completions)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Tasks, and where the source stood behind them."""

    tasks: Sequence[Task]
    cursor: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What round `number` is going to begin with, and where the source stood behind its tasks."""

    number: int
    cursor: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What a round begins with."""

    rollouts: Sequence[RolloutGroup]
    cursor: Mapping[str, int]
    seconds: float


class Sapo:
    """Runs rounds, one after the other. `on_phase` is told which part of a round begins."""

    def __init__(
        self,
        plan: RoundPlan,
        learner: Learner,
        source: TaskSource,
        scorer: Scorer,
        pool: Pool,
        swarm: Swarm,
        selection: Selection,
        on_phase: Callable[[Phase], None],
    ) -> None:
        self._plan = plan
        self._learner = learner
        self._source = source
        self._scorer = scorer
        self._pool = pool
        self._swarm = swarm
        self._selection = selection
        self._on_phase = on_phase
        self._drawn: _Drawn | None = None
        self._ahead: _Ahead | None = None

    async def round(self, number: int, *, another: bool = False) -> RoundResult:
        """One round. The update is its last step: if this is cancelled before, the policy is as it was.

        `another` is to follow: it is begun meanwhile, as far as the plan allows.
        """
        plan = self._plan
        watch = _Watch(self._on_phase)
        sampled = await self._sampled_ahead(number, watch) or await self._sample(number, another, watch)
        # Nothing is waited for after the update: once that has been made, the round must not fail or be cancelled.
        with unwrapped():
            async with trio.open_nursery() as ahead:
                if another and plan.overlap:
                    ahead.start_soon(self._sample_ahead, number + 1)
                watch.begin("score")
                local = await self._score(sampled.rollouts, number)
                watch.begin("share")
                await self._pool.add(local)
                sent = await self._swarm.share(shared(local, plan.share, self._random(number, "share")), number)
                if ahead.child_tasks:
                    watch.begin("generate")

        external: dict[int, ScoredGroup] = {}
        stats: UpdateStats | None = None
        problem, first_used = "", Counter[str]()
        if plan.train:
            watch.begin("mix")
            external, parts, new = await self._mix(number, local)
            watch.begin("update")
            stats, problem, first_used = await self._update(number, local, external, parts, new)
        seconds = watch.end()
        return RoundResult(
            number=number,
            local=tuple(local),
            external=tuple(external.values()),
            unscored=len(sampled.rollouts) - len(local),
            batches_sent=sent,
            stats=stats,
            problem=problem,
            seconds_generate=sampled.seconds,
            seconds_score=seconds["score"],
            seconds_share=seconds["share"] + seconds.get("mix", 0.0),
            seconds_update=seconds.get("update", 0.0),
            first_used=first_used,
            cursor=sampled.cursor,
        )

    async def _sample(self, number: int, another: bool, watch: "_Watch") -> _Sampled:
        """Draw and generate of round `number`; where `another` follows, its tasks are drawn meanwhile."""
        if self._drawn is None:
            watch.begin("draw")
        async with self._drawing(another) as drawn:
            watch.begin("generate")
            begun = time.monotonic()
            seed = round_seed(self._plan.seed, number, "generate")
            rollouts = await self._learner.generate(drawn.tasks, self._plan.sampling, seed)
            seconds = time.monotonic() - begun
        return _Sampled(rollouts, drawn.cursor, seconds)

    async def _sample_ahead(self, number: int) -> None:
        """Begin to sample round `number`, and draw the tasks of the one after it."""
        async with self._drawing(True) as drawn:
            seed = round_seed(self._plan.seed, number, "generate")
            await self._learner.generate_ahead(drawn.tasks, self._plan.sampling, seed)
        self._ahead = _Ahead(number, drawn.cursor)

    async def _sampled_ahead(self, number: int, watch: "_Watch") -> _Sampled | None:
        """What has been begun of round `number`, if anything has."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.number != number:
            return None
        watch.begin("generate")
        rollouts, seconds = await self._learner.generated_ahead()
        return _Sampled(rollouts, ahead.cursor, seconds)

    @asynccontextmanager
    async def _drawing(self, another: bool) -> AsyncIterator[_Drawn]:
        """The tasks that come next; with `another` those after them are drawn meanwhile."""
        if self._drawn is None:
            await self._draw()
        drawn, self._drawn = self._drawn, None
        assert drawn is not None
        with unwrapped():
            async with trio.open_nursery() as nursery:
                if another:
                    nursery.start_soon(self._draw)
                yield drawn

    async def _draw(self) -> None:
        self._drawn = _Drawn(await self._source.draw(self._plan.local), self._source.cursor)

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

    async def _mix(
        self, number: int, local: Sequence[ScoredGroup]
    ) -> tuple[dict[int, ScoredGroup], list[ScoredGroup], set[int]]:
        """Groups of others by their id in the pool, chosen among those of which something fits the model; what of each
        is trained on, in the same order; and which of them no round has trained on.
        """
        plan = self._plan
        if plan.external == 0:
            return {}, [], set()
        informative = sum(group.informative for group in local)
        room = Room(number, plan.local, informative, plan.external, plan.per_peer, plan.sampling.samples)
        random = self._random(number, "mix")
        candidates = await self._pool.candidates(number - plan.max_age, plan.reuse)
        external: dict[int, ScoredGroup] = {}
        parts: list[ScoredGroup] = []
        refused: set[int] = set()
        for _ in range(MAX_CHOICES):
            chosen = [c.id for c in self._selection.choose(candidates, room, random)]
            groups = await self._pool.take(chosen)
            found = [self._selection.part(group, plan.sampling.samples) for group in groups.values()]
            fits = await self._learner.fits(found) if groups else []
            external = {key: groups[key] for key, fit in zip(groups, fits, strict=True) if fit}
            parts = [part for part, fit in zip(found, fits, strict=True) if fit]
            if len(external) == len(chosen):
                break
            # Chosen anew as a whole, so that the choice is what it would be had the misfits never been there.
            refused.update(set(chosen) - external.keys())
            candidates = [candidate for candidate in candidates if candidate.id not in refused]
        await self._pool.settle(external, refused, number)
        return external, parts, {candidate.id for candidate in candidates if candidate.uses == 0} & external.keys()

    async def _update(
        self,
        number: int,
        local: Sequence[ScoredGroup],
        external: Mapping[int, ScoredGroup],
        parts: Sequence[ScoredGroup],
        new: set[int],
    ) -> tuple[UpdateStats | None, str, Counter[str]]:
        """The learning step: (what it did, else what went wrong, the origins of the groups that were used first)."""
        try:
            stats = await self._learner.update([*local, *parts], round_seed(self._plan.seed, number, "update"))
        except TrainingError as error:
            return None, str(error), Counter()
        refused = await self._refuse(stats, len(local), list(external), number)
        return stats, "", Counter(external[key].origin for key in new - refused)

    async def _refuse(self, stats: UpdateStats, local: int, external: Sequence[int], number: int) -> set[int]:
        """Do not choose again what the likelihood gate has refused, once it knows what it goes by. Returns its ids."""
        refused = {external[place - local] for place in stats.refused if place >= local}
        if refused and stats.gate is not None and math.isfinite(stats.gate):
            # The update has been made, so the round is to be finished.
            with trio.CancelScope(shield=True):
                await self._pool.settle((), refused, number)
        return refused

    def _random(self, number: int, purpose: str) -> Random:
        return Random(round_seed(self._plan.seed, number, purpose))


class _Watch:
    """Announces the phases of a round and takes their time."""

    def __init__(self, announce: Callable[[Phase], None]) -> None:
        self._announce = announce
        self._begun: list[tuple[Phase, float]] = []

    def begin(self, phase: Phase) -> None:
        """The phase before, if any, ends."""
        self._begun.append((phase, time.monotonic()))
        self._announce(phase)

    def end(self) -> dict[Phase, float]:
        """Seconds of each phase."""
        ends = [*(begun for _, begun in self._begun[1:]), time.monotonic()]
        seconds: dict[Phase, float] = {}
        for (phase, begun), end in zip(self._begun, ends, strict=True):
            seconds[phase] = seconds.get(phase, 0.0) + end - begun
        return seconds


def _mean_reward(groups: Sequence[ScoredGroup]) -> float:
    return sum(group.mean_reward for group in groups) / len(groups)


def round_seed(seed: int, number: int, purpose: str) -> int:
    """A seed for one purpose of one round, below 2**63.

    Deriving it instead of carrying a generator's state along means that there is no such state to save or to lose.
    """
    digest = hashlib.sha256(f"{seed}/{number}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
