"""A swarm in one process: as many real rounds as there are nodes, in lock step over one stack of policies.

Each node runs the product's own round (`rl.sapo.Sapo`) with its own pool (`rl.pool.SqlitePool`), task stream, selection
and likelihood gate. What is simulated is around it: all nodes' policies are one stack of small Llamas
(`bench.sim.stack`), so each waits for the others where it samples, shares and updates; and the network is a list, which
may delay and lose groups.
"""

import hashlib
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
import trio
from torch import Tensor

from bench.sim.adam import StackedAdam
from bench.sim.stack import StackedPolicy
from bench.sim.tasks import MAX_NEW_TOKENS, Codec, Verifiers, mix_of
from rl.advantage import advantages
from rl.batches import Group, Row
from rl.engines.base import Sampled
from rl.gate import Gate
from rl.loss import TokenBatch, policy_loss, token_weights
from rl.pool import SqlitePool
from rl.rollouts import Completion, RolloutGroup, Sampling, ScoredGroup, UpdateStats
from rl.sapo import RoundPlan, RoundResult, Sapo
from rl.selection import STRATEGIES, Candidate, Strategy
from verifiers.base import Task
from verifiers.sandbox import Sandbox
from verifiers.stream import TaskStream

CLIP_LOW, CLIP_HIGH, MAX_NORM = 0.2, 0.28, 1.0
"""As the product has them by default."""

ECHO = "echo"
"""Under this name a node's own groups come back to it where it replays them."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Plan:
    """One run. What has no explanation here means what it means in the product's configuration.

    `group_sizes` repeat over the nodes. `informative` trains a round on at most so many of its own informative groups
    and drops the rest (0: no limit), which with a large `local` is refilling dead groups by brute force. `replay` gives
    a node its own groups back as if they were others'. `own_task` has each node meet its own kind alone.

    `delay` rounds pass before a group arrives; with `delay_up_to` the delay of each is drawn from 0 to that. `loss` is
    the chance that a group is lost on its way to one receiver. Node n takes part in every `speeds[n]`-th tick (the
    speeds repeat). `reset_every` ticks one node in turn starts over from its first policy. `hostile` nodes, the last
    ones, send right answers behind junk, or nothing if `attack` is `silent`.
    """

    local: int = 4
    external: int = 4
    selection: Strategy = "uniform"
    half_life: float = 0.0
    per_peer: int = 2
    max_age: int = 20
    reuse: int = 1
    lr: float = 4e-4
    epochs: int = 1
    gate: bool = True
    rounds: int = 100
    seed: int = 0
    group_sizes: tuple[int, ...] = (8,)
    temperature: float = 1.0
    lr_end: float = 1.0
    entropy: float = 0.0
    informative: int = 0
    replay: bool = False
    own_task: bool = False
    delay: int = 0
    delay_up_to: int = 0
    loss: float = 0.0
    speeds: tuple[int, ...] = (1,)
    reset_every: int = 0
    hostile: int = 0
    attack: str = "junk"
    lenient: bool = False


@dataclass
class History:
    """What came of a run, a list entry a tick: means over the honest nodes that took part.

    `per_node` holds each honest node's reward a tick (None where it did not take part).
    """

    reward: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    informative: list[float] = field(default_factory=list)
    external: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    generated: int = 0
    refused: int = 0
    offered: int = 0
    threshold: list[float] = field(default_factory=list)
    per_node: list[list[float | None]] = field(default_factory=list)
    held_out: dict[int, list[float]] = field(default_factory=dict)


class Together(Generic[T, R]):
    """Waits until all who take part have come with what they want, and does it for all at once."""

    def __init__(self, work: Callable[[Mapping[int, T]], Mapping[int, R]]) -> None:
        self._work = work
        self._parties = 0

    def begin(self, parties: int) -> None:
        """So many will come."""
        self._parties = parties
        self._asked: dict[int, T] = {}
        self._done = trio.Event()

    async def __call__(self, node: int, wish: T) -> R:
        """What became of this node's wish."""
        self._asked[node] = wish
        if len(self._asked) == self._parties:
            # In the order of the nodes, not in that in which they happened to come.
            self._results = self._work(dict(sorted(self._asked.items())))
            self._done.set()
        await self._done.wait()
        return self._results[node]


@dataclass(frozen=True)
class _Update:
    groups: Sequence[ScoredGroup]


class Swarm:
    """Some nodes over stacks of policies. `parts` are stacks whose nodes are numbered through."""

    def __init__(self, plan: Plan, parts: Sequence[StackedPolicy], codec: Codec, files: Sequence[Path]) -> None:
        self.plan = plan
        self.codec = codec
        self._parts = list(parts)
        self._adams = [StackedAdam(part, lr=plan.lr) for part in parts]
        counts = [part.nodes for part in parts]
        self.count = sum(counts)
        self._places = [(number, at) for number, count in enumerate(counts) for at in range(count)]
        self._first = [self._parts[number].state(at) for number, at in self._places]
        self._files = files
        self.verifiers = Verifiers(lenient=plan.lenient)
        self.honest = range(self.count - plan.hostile)
        self.tick = 0
        self._network = random.Random(f"{plan.seed}/network")
        self._on_the_way: list[tuple[int, int, ScoredGroup]] = []
        self.sample = Together(self._sample)
        self.deliver = Together(self._deliver)
        self.update = Together(self._update)
        self.nodes: list[Node] = []
        self.history = History()

    async def run(self, held_out_every: int = 0, on_tick: Callable[[int], None] = lambda tick: None) -> History:
        """All ticks. With `held_out_every` the accuracy on held-out tasks is measured that often, and before."""
        self.nodes = [Node(self, number) for number in range(self.count)]
        for node in self.nodes:
            await node.open()
        if held_out_every:
            self.history.held_out[0] = await self.accuracy()
        for tick in range(1, self.plan.rounds + 1):
            self.tick = tick
            await self._one_tick()
            if held_out_every and tick % held_out_every == 0:
                self.history.held_out[tick] = await self.accuracy()
            on_tick(tick)
        for node in self.nodes:
            node.pool.close()
        return self.history

    async def _one_tick(self) -> None:
        plan = self.plan
        if plan.reset_every and self.tick % plan.reset_every == 0:
            self._reset(self.tick // plan.reset_every % len(self.honest))
        for adam in self._adams:
            adam.lr = plan.lr * (1.0 + (plan.lr_end - 1.0) * (self.tick - 1) / max(1, plan.rounds - 1))
        due = [node for node in self.nodes if self.tick % plan.speeds[node.number % len(plan.speeds)] == 0]
        learning = [node for node in due if node.number in self.honest]
        for meeting, parties in ((self.sample, learning), (self.deliver, due), (self.update, learning)):
            cast("Together[Any, Any]", meeting).begin(len(parties))
        async with trio.open_nursery() as nursery:
            for node in due:
                nursery.start_soon(node.round)
        self._note(learning)

    def _note(self, nodes: Sequence["Node"]) -> None:
        history = self.history
        results = {node.number: node.result for node in nodes}
        history.per_node.append([results[n].reward_local if n in results else None for n in self.honest])
        if not nodes:
            return
        history.reward.append(_mean([result.reward_local for result in results.values()]))
        history.entropy.append(_mean([node.entropy for node in nodes]))
        history.informative.append(_mean([node.informative for node in nodes]))
        history.external.append(_mean([len(result.external) for result in results.values()]))
        history.tokens.append(_mean([r.stats.tokens_trained if r.stats else 0 for r in results.values()]))
        history.threshold.append(_mean([node.gate.threshold for node in nodes]))
        history.generated += sum(len(result.local) for result in results.values())

    def _reset(self, number: int) -> None:
        part, at = self._places[number]
        self._parts[part].set_state(at, self._first[number])
        self._adams[part].reset(at)
        self.nodes[number].forget()

    # What the nodes meet for

    def _sample(self, wishes: Mapping[int, tuple[list[tuple[int, ...]], Sampling, int]]) -> dict[int, Any]:
        results: dict[int, Any] = {}
        for number, part in enumerate(self._parts):
            mine = {node: wishes[node] for node in wishes if self._places[node][0] == number}
            # One call samples groups of one size; nodes of another size have a call of their own.
            for size in sorted({sampling.samples for _, sampling, _ in mine.values()}):
                asking = {node: wish for node, wish in mine.items() if wish[1].samples == size}
                prompts: list[list[tuple[int, ...]]] = [[] for _ in range(part.nodes)]
                for node, (asked, _, _) in asking.items():
                    prompts[self._places[node][1]] = asked
                seeds = [seed for _, _, seed in asking.values()]
                sampling = next(iter(asking.values()))[1]
                sampled = part.sample(
                    prompts,
                    size,
                    sampling.max_new_tokens,
                    torch.Generator().manual_seed(_digest(number, size, *seeds)),
                    eos=self.codec.eos,
                    temperature=sampling.temperature,
                )
                results |= {node: sampled[self._places[node][1]] for node in asking}
        return results

    def _deliver(self, sent: Mapping[int, Sequence[ScoredGroup]]) -> dict[int, int]:
        plan = self.plan
        for sender, groups in sent.items():
            for receiver in self.nodes:
                if (receiver.number == sender) != plan.replay or receiver.number not in self.honest:
                    continue
                for group in groups:
                    if plan.loss and self._network.random() < plan.loss:
                        continue
                    late = self._network.randint(0, plan.delay_up_to) if plan.delay_up_to else plan.delay
                    self._on_the_way.append((self.tick + late, receiver.number, group))
        due = [(receiver, group) for when, receiver, group in self._on_the_way if when <= self.tick]
        self._on_the_way = [item for item in self._on_the_way if item[0] > self.tick]
        for node in self.nodes:
            node.receive([group for receiver, group in due if receiver == node.number])
        return {number: len(groups) for number, groups in sent.items()}

    def _update(self, wishes: Mapping[int, _Update]) -> dict[int, UpdateStats]:
        stats: dict[int, UpdateStats] = {}
        for number, part in enumerate(self._parts):
            mine: list[Sequence[ScoredGroup]] = [()] * part.nodes
            for node, wish in wishes.items():
                if self._places[node][0] == number:
                    mine[self._places[node][1]] = wish.groups
            nodes = [self.nodes[node] for node, place in enumerate(self._places) if place[0] == number]
            step = _Step(self.plan, nodes, [[self._group(scored) for scored in groups] for groups in mine])
            step.take(part, self._adams[number])
            stats |= {one.number: step.stats(self._places[one.number][1]) for one in nodes if one.number in wishes}
        return stats

    def _group(self, scored: ScoredGroup) -> Group:
        rows = tuple(
            Row(c.tokens or self.codec.answer(c.text, c.finished), advantage, c.logprobs)
            for c, advantage in zip(scored.group.completions, scored.advantages, strict=True)
        )
        return Group(self.codec.prompt(scored.group.task.prompt), rows)

    async def accuracy(self, per_kind: int = 16, samples: int = 2) -> list[float]:
        """Share of right answers, sampled at temperature 1, to prompts that nobody trains on: one number a node."""
        stream = await TaskStream.open(
            cast(Sandbox, self.verifiers), mix_of(self._files), seed=_digest("held out"), held_out=True
        )
        tasks = [task for kind in range(len(stream.kinds)) for task in await stream.draw_distinct(kind, per_kind)]
        sampling = Sampling(samples, MAX_NEW_TOKENS)
        prompts = [self.codec.prompt(task.prompt) for task in tasks]
        sampled = self._sample({n: (prompts, sampling, _digest(self.plan.seed, n)) for n in self.honest})
        found = []
        for node in self.honest:
            scores = [
                score
                for task, group in zip(tasks, sampled[node], strict=True)
                for score in await self.verifiers.score(task, [self.codec.text(s.tokens) for s in group])
            ]
            found.append(_mean(scores))
        return found


class _Step:
    """One learning step of a whole stack: `rl.policy`'s, for small models that fit memory at once."""

    def __init__(self, plan: Plan, nodes: Sequence["Node"], groups: Sequence[Sequence[Group]]) -> None:
        self._plan = plan
        self._nodes = nodes
        # What does not differ has no gradient.
        self._kept = [
            [(place, group) for place, group in enumerate(mine) if any(row.advantage for row in group.rows)]
            for mine in groups
        ]
        self._refused: list[dict[int, int]] = [{} for _ in nodes]
        self._tokens = [0] * len(nodes)
        self._thresholds = [node.gate.threshold for node in nodes]
        self._norms = [0.0] * len(nodes)

    def take(self, policy: StackedPolicy, adam: StackedAdam) -> None:
        """`epochs` steps; the ratio of the first is 1, those after are clipped."""
        if not any(self._kept):
            return
        groups = [[group for _, group in mine] for mine in self._kept]
        old: Tensor | None = None
        weights = torch.empty(0)
        for _ in range(self._plan.epochs):
            scores = policy.scores(groups)
            if old is None:
                old = scores.logprobs.detach()
                weights = self._weights(old, scores.lengths)
            advantage = torch.tensor([row.advantage for mine in groups for group in mine for row in group.rows])
            spread = advantage.repeat_interleave(torch.tensor(scores.lengths))
            terms = policy_loss(TokenBatch(scores.logprobs, old, spread, weights), CLIP_LOW, CLIP_HIGH)
            terms.loss.backward()  # type: ignore[no-untyped-call]
            self._norms = adam.step([count > 0 for count in self._tokens], MAX_NORM)

    def _weights(self, logprobs: Tensor, lengths: Sequence[int]) -> Tensor:
        """The weight of each token: none for what the gate refuses, and nothing for it in the average."""
        means = [float(part.mean()) for part in torch.split(logprobs, list(lengths))]
        weights: list[float] = []
        row_number = 0
        for at, mine in enumerate(self._kept):
            kept: list[bool] = []
            sizes: list[int] = []
            for place, group in mine:
                count = len(group.rows)
                passed = self._passed(at, place, group, means[row_number : row_number + count])
                kept += passed
                sizes += [len(row.tokens) for row in group.rows]
                row_number += count
            trained = [size for size, keep in zip(sizes, kept, strict=True) if keep]
            self._tokens[at] = sum(trained)
            each = iter(token_weights(trained, "dapo", MAX_NEW_TOKENS) if trained else [])
            for size, keep in zip(sizes, kept, strict=True):
                weights += [next(each) if keep else 0.0] * size
        return torch.tensor(weights)

    def _passed(self, at: int, place: int, group: Group, means: Sequence[float]) -> list[bool]:
        # An own completion has the log-probs of its sampling.
        if not self._plan.gate or group.rows[0].sampled is not None:
            return [True] * len(group.rows)
        gate = self._nodes[at].gate
        refused = [row.advantage > 0 and gate.refuses(mean) for row, mean in zip(group.rows, means, strict=True)]
        if any(refused):
            self._refused[at][place] = sum(refused)
        positive = [row.advantage > 0 for row in group.rows]
        if all(bad for bad, good in zip(refused, positive, strict=True) if good):
            return [False] * len(group.rows)
        return [not bad for bad in refused]

    def stats(self, at: int) -> UpdateStats:
        """Of one node's step."""
        return UpdateStats(
            policy_step=0,
            tokens_trained=self._tokens[at],
            loss=0.0,
            clip_fraction=0.0,
            entropy=0.0,
            grad_norm=self._norms[at],
            kl=0.0,
            learning_rate=self._plan.lr,
            engine_logprob_gap=None,
            token_budget=0,
            refused=tuple(self._refused[at]),
            refused_completions=sum(self._refused[at].values()),
            gate=self._thresholds[at],
        )


class Node:
    """One node: what `rl.sapo.Sapo` needs of its surroundings (learner, scorer, pool, swarm), as small as can be."""

    result: RoundResult

    def __init__(self, swarm: Swarm, number: int) -> None:
        self.number = number
        self.name = f"node-{number + 1}"
        self.gate = Gate()
        self.entropy = 0.0
        self.informative = 0
        self.rounds = 0
        self.pool = SqlitePool(Path(":memory:"), self.name)
        self._swarm = swarm
        self._plan = swarm.plan
        self._random = random.Random(f"{swarm.plan.seed}/{number}/hostile")

    async def open(self) -> None:
        """Open the task stream and make the round."""
        plan, swarm = self._plan, self._swarm
        files = swarm._files
        weights = [float(n == self.number % len(files)) for n in range(len(files))] if plan.own_task else None
        self._stream = await TaskStream.open(
            cast(Sandbox, swarm.verifiers), mix_of(files, weights), seed=_digest(plan.seed, self.number)
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
            seed=_digest(plan.seed, self.number, "round"),
        )
        selection = STRATEGIES[plan.selection](plan.half_life)
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
        """Groups in which half of the completions are right behind junk."""
        if self._plan.attack == "silent":
            return []
        groups = []
        for task in await self._stream.draw(self._plan.local):
            junk = "".join(self._random.choices("#@~^|", k=3))
            right = Completion(f"{junk}{task.answer}", True)
            completions = tuple(right if n % 2 else Completion(f"{junk}{n}", True) for n in range(8))
            rewards = tuple(await self._swarm.verifiers.score(task, [c.text for c in completions]))
            group = RolloutGroup(task, completions, 0)
            groups.append(ScoredGroup(group, self.name, self.rounds, rewards, advantages(rewards)))
        return groups

    # rl.protocols.Learner

    async def generate(self, tasks: Sequence[Task], sampling: Sampling, seed: int) -> list[RolloutGroup]:
        """See `rl.protocols.Learner`."""
        codec = self._swarm.codec
        prompts = [codec.prompt(task.prompt) for task in tasks]
        sampled: list[list[Sampled]] = await self._swarm.sample(self.number, (prompts, sampling, seed))
        everything = [s for group in sampled for s in group]
        self.gate.observe([math.fsum(s.logprobs) / len(s.logprobs) for s in everything])
        # The mean of -log p over what was sampled is what the entropy is the expectation of.
        self.entropy = -math.fsum(math.fsum(s.logprobs) for s in everything) / sum(len(s.tokens) for s in everything)
        return [
            RolloutGroup(
                task,
                tuple(Completion(codec.text(s.tokens), s.finished, s.tokens, s.logprobs) for s in group),
                self.rounds,
            )
            for task, group in zip(tasks, sampled, strict=True)
        ]

    async def fits(self, groups: Sequence[ScoredGroup]) -> list[bool]:
        """All do: they were made by models of the same context."""
        return [any(advantage > 0 for advantage in group.advantages) for group in groups]

    async def update(self, groups: Sequence[ScoredGroup], seed: int) -> UpdateStats:
        """See `rl.protocols.Learner`."""
        if self._plan.informative:
            own = [g for g in groups if g.origin == self.name and g.informative][: self._plan.informative]
            groups = [*own, *(g for g in groups if g.origin != self.name)]
        self.informative = sum(any(group.advantages) for group in groups)
        stats: UpdateStats = await self._swarm.update(self.number, _Update(groups))
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
        return await self._swarm.deliver(self.number, groups)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _digest(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
