"""A simulated node: what `rl.sapo.Sapo` needs of its surroundings, as small as can be."""

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from bench.sim.attacks import ATTACKS, completions, disguise, poisoned
from bench.sim.plan import History, Plan, digest
from bench.sim.tasks import MAX_NEW_TOKENS, Codec, Verifiers, mix_of
from bench.sim.tried import ALL
from rl.advantage import advantages
from rl.engines.base import Sampled
from rl.gate import Gate, likelihood
from rl.pool import SqlitePool
from rl.rollouts import Completion, RolloutGroup, Sampling, ScoredGroup, UpdateStats
from rl.sapo import RoundPlan, RoundResult, Sapo
from rl.selection import Candidate
from verifiers.base import Task
from verifiers.sandbox import Sandbox
from verifiers.stream import TaskStream

ECHO = "echo"
"""Under this name a node's own groups come back to it where it replays them."""


class Meeting(Protocol):
    """Where nodes wait for each other; see `bench.sim.world.Together`."""

    async def __call__(self, node: int, wish: Any, /) -> Any:
        """What became of a node's wish."""
        ...


class Around(Protocol):
    """What a node knows of its swarm."""

    plan: Plan
    codec: Codec
    files: Sequence[Path]
    verifiers: Verifiers
    honest: range
    sent: list[ScoredGroup]
    history: History
    sample: Meeting
    deliver: Meeting
    update: Meeting


class Node:
    """One node: what `rl.sapo.Sapo` needs of its surroundings (learner, scorer, pool, swarm), as small as can be."""

    result: RoundResult

    def __init__(self, swarm: Around, number: int) -> None:
        self.number = number
        self.name = f"node-{number + 1}"
        self.gate = Gate()
        self.entropy = 0.0
        self.informative = 0
        self.poisoned = 0.0
        self.rounds = 0
        self._ahead: list[RolloutGroup] = []
        self.pool = SqlitePool(Path(":memory:"), self.name)
        self._swarm = swarm
        self._plan = swarm.plan
        self._random = random.Random(f"{swarm.plan.seed}/{number}/hostile")

    async def open(self) -> None:
        """Open the task stream and make the round."""
        plan, swarm = self._plan, self._swarm
        files = swarm.files
        weights = [float(n == self.number % len(files)) for n in range(len(files))] if plan.own_task else None
        self._stream = await TaskStream.open(
            cast(Sandbox, swarm.verifiers), mix_of(files, weights), seed=digest(plan.seed, self.number)
        )
        size = plan.group_sizes[self.number % len(plan.group_sizes)]
        self._round_plan = RoundPlan(
            origin=self.name,
            local=plan.local,
            external=plan.external,
            # What is not informative is never chosen, so it need not travel.
            share="informative",
            max_age=plan.max_age,
            reuse=plan.reuse,
            per_peer=plan.per_peer,
            sampling=Sampling(size, MAX_NEW_TOKENS, plan.temperature),
            advantage="group",
            seed=digest(plan.seed, self.number, "round"),
        )
        selection = ALL[plan.selection](plan.half_life)
        self._sapo = Sapo(
            self._round_plan, self, self._stream, swarm.verifiers, self, self, selection, lambda phase: None
        )

    async def round(self) -> None:
        """This node's next round; a hostile one only sends."""
        self.rounds += 1
        if self.number in self._swarm.honest:
            self.result = await self._sapo.round(self.rounds)
        else:
            await self._swarm.deliver(self.number, await self._attack())

    def receive(self, groups: Sequence[ScoredGroup]) -> None:
        """Groups of others, or its own where it replays them. Rewards are what this node's verifiers give: the same."""
        named = [replace(g, round=self.rounds, origin=ECHO if g.origin == self.name else g.origin) for g in groups]
        self._swarm.history.offered += len(named)
        if named:
            self.pool.add(named)

    def forget(self) -> None:
        """Start over: an empty pool, and nothing known of what the policy says."""
        self.pool.close()
        self.pool = SqlitePool(Path(":memory:"), self.name)
        self.gate = Gate()

    async def _attack(self) -> list[ScoredGroup]:
        attack = ATTACKS[self._plan.attack]
        if attack.copies:
            stolen = self._random.sample(self._swarm.sent, min(self._plan.local, len(self._swarm.sent)))
            own = [replace(group, origin=self.name, round=self.rounds) for group in stolen]
            return [disguise(group, self._random) for group in own] if attack.disguised else own
        groups = []
        for task in await self._stream.draw(attack.times * self._plan.local) if attack.answers else ():
            assert attack.answers is not None
            answers = attack.answers(task, self.rounds / self._plan.rounds, self._random)
            claimed = [reward for _, reward in answers]
            found = await self._swarm.verifiers.score(task, [text for text, _ in answers])
            rewards = tuple(claimed if self._plan.trusting else found)
            group = RolloutGroup(task, completions(answers), 0)
            groups.append(ScoredGroup(group, self.name, self.rounds, rewards, advantages(rewards)))
        return [group for group in groups if group.informative]

    # rl.protocols.Learner

    async def generate(self, tasks: Sequence[Task], sampling: Sampling, seed: int) -> list[RolloutGroup]:
        """See `rl.protocols.Learner`."""
        codec = self._swarm.codec
        prompts = [codec.prompt(task.prompt) for task in tasks]
        sampled: list[list[Sampled]] = await self._swarm.sample(self.number, (prompts, sampling, seed))
        everything = [s for group in sampled for s in group]
        self.gate.observe([likelihood(s.logprobs) for s in everything])
        # The mean of -log p over what was sampled is what the entropy is the expectation of.
        self.entropy = -math.fsum(math.fsum(s.logprobs) for s in everything) / sum(len(s.tokens) for s in everything)
        self.poisoned = poisoned([codec.text(s.tokens) for s in everything])
        return [
            RolloutGroup(
                task,
                tuple(Completion(codec.text(s.tokens), s.finished, s.tokens, s.logprobs) for s in group),
                self.rounds,
            )
            for task, group in zip(tasks, sampled, strict=True)
        ]

    async def generate_ahead(self, tasks: Sequence[Task], sampling: Sampling, seed: int) -> None:
        """See `rl.protocols.Learner`."""
        self._ahead = await self.generate(tasks, sampling, seed)

    async def generated_ahead(self) -> tuple[list[RolloutGroup], float]:
        """See `rl.protocols.Learner`. In a simulation no time goes by."""
        return self._ahead, 0.0

    async def fits(self, groups: Sequence[ScoredGroup]) -> list[bool]:
        """All do: they were made by models of the same context."""
        return [any(advantage > 0 for advantage in group.advantages) for group in groups]

    async def update(self, groups: Sequence[ScoredGroup], seed: int) -> UpdateStats:
        """See `rl.protocols.Learner`."""
        if self._plan.informative:
            # The places of others' groups would no longer be those that the round knows.
            assert not self._plan.external
            own = [g for g in groups if g.origin == self.name and g.informative][: self._plan.informative]
            groups = [*own, *(g for g in groups if g.origin != self.name)]
        self.informative = sum(any(group.advantages) for group in groups)
        stats: UpdateStats = await self._swarm.update(self.number, groups)
        self._swarm.history.refused += stats.refused_completions
        return stats

    # rl.protocols.Pool

    async def add(self, groups: Sequence[ScoredGroup]) -> None:
        """Own groups are not needed again."""

    async def candidates(self, since: int, reuse: int) -> list[Candidate]:
        """See `rl.protocols.Pool`."""
        return self.pool.candidates(since, reuse)

    async def take(self, ids: Collection[int]) -> dict[int, ScoredGroup]:
        """See `rl.protocols.Pool`."""
        return self.pool.take(ids)

    async def settle(self, used: Collection[int], refused: Collection[int], number: int) -> None:
        """See `rl.protocols.Pool`."""
        self.pool.settle(used, refused, number)

    # rl.protocols.Swarm

    async def share(self, groups: Sequence[ScoredGroup], number: int, /) -> int:
        """See `rl.protocols.Swarm`."""
        sent: int = await self._swarm.deliver(self.number, groups)
        return sent
