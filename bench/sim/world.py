"""A swarm in one process: as many real rounds as there are nodes, in lock step over one stack of policies.

Each node runs the product's own round (`rl.sapo.Sapo`) with its own pool (`rl.pool.SqlitePool`), task stream, selection
and likelihood gate. What is simulated is around it: all nodes' policies are one stack of small Llamas
(`bench.sim.stack`), so each waits for the others where it samples, shares and updates; and the network is a list, which
may delay and lose groups.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
import trio

from bench.sim.adam import StackedAdam
from bench.sim.node import Meeting, Node
from bench.sim.plan import HeldOut, History, Plan, digest, mean
from bench.sim.stack import StackedPolicy
from bench.sim.step import Step
from bench.sim.tasks import MAX_NEW_TOKENS, Codec, Verifiers, mix_of
from rl.batches import Group, Row
from rl.rollouts import Sampling, ScoredGroup, UpdateStats
from verifiers.sandbox import Sandbox
from verifiers.stream import TaskStream

T = TypeVar("T")
R = TypeVar("R")


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


class Swarm:
    """Some nodes over stacks of policies. `parts` are stacks whose nodes are numbered through."""

    def __init__(self, plan: Plan, parts: Sequence[StackedPolicy], codec: Codec, files: Sequence[Path]) -> None:
        self.plan = plan
        self.codec = codec
        self._parts = list(parts)
        self._adams = [StackedAdam(part, plan.lr) for part in parts]
        counts = [part.nodes for part in parts]
        self.count = sum(counts)
        self._places = [(number, at) for number, count in enumerate(counts) for at in range(count)]
        self._first = [self._parts[number].state(at) for number, at in self._places]
        self.files: Sequence[Path] = files
        self.verifiers = Verifiers(lenient=plan.lenient)
        self.honest = range(self.count - plan.hostile)
        self.tick = 0
        self._network = random.Random(f"{plan.seed}/network")
        self.sent: list[ScoredGroup] = []
        self._on_the_way: list[tuple[int, int, ScoredGroup]] = []
        self.sample: Meeting = Together(self._sample)
        self.deliver: Meeting = Together(self._deliver)
        self.update: Meeting = Together(self._update)
        self.nodes: list[Node] = []
        self.history = History()

    async def run(self, held_out_every: int = 0, on_tick: Callable[[int], None] = lambda tick: None) -> History:
        """All ticks. With `held_out_every` nodes are measured on held-out tasks that often, and before."""
        self.nodes = [Node(self, number) for number in range(self.count)]
        for node in self.nodes:
            await node.open()
        if held_out_every:
            self.history.held_out[0] = await self.measure()
        for tick in range(1, self.plan.rounds + 1):
            self.tick = tick
            await self._one_tick()
            if held_out_every and tick % held_out_every == 0:
                self.history.held_out[tick] = await self.measure()
            on_tick(tick)
        for node in self.nodes:
            node.pool.close()
        return self.history

    async def _one_tick(self) -> None:
        plan = self.plan
        if plan.reset_every and self.tick % plan.reset_every == 0:
            self._reset(self.tick // plan.reset_every % len(self.honest))
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
        history.reward.append(mean([result.reward_local for result in results.values()]))
        history.entropy.append(mean([node.entropy for node in nodes]))
        history.informative.append(mean([node.informative for node in nodes]))
        history.poisoned.append(mean([node.poisoned for node in nodes]))
        history.external.append(mean([len(result.external) for result in results.values()]))
        history.tokens.append(mean([r.stats.tokens_trained if r.stats else 0 for r in results.values()]))
        history.threshold.append(mean([node.gate.threshold for node in nodes]))
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
                    torch.Generator().manual_seed(digest(number, size, *seeds)),
                    eos=self.codec.eos,
                    temperature=sampling.temperature,
                )
                results |= {node: sampled[self._places[node][1]] for node in asking}
        return results

    def _deliver(self, sent: Mapping[int, Sequence[ScoredGroup]]) -> dict[int, int]:
        plan = self.plan
        self.sent = [group for sender, groups in sent.items() if sender in self.honest for group in groups]
        for sender, groups in sent.items():
            for receiver in self.nodes:
                if (receiver.number == sender) != plan.replay or receiver.number not in self.honest:
                    continue
                if not plan.external:
                    # Nobody would ever look at them.
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

    def _update(self, wishes: Mapping[int, Sequence[ScoredGroup]]) -> dict[int, UpdateStats]:
        stats: dict[int, UpdateStats] = {}
        for number, part in enumerate(self._parts):
            mine: list[Sequence[ScoredGroup]] = [()] * part.nodes
            for node, wish in wishes.items():
                if self._places[node][0] == number:
                    mine[self._places[node][1]] = wish
            nodes = [self.nodes[node] for node, place in enumerate(self._places) if place[0] == number]
            step = Step(
                self.plan, [one.gate for one in nodes], [[self._group(scored) for scored in groups] for groups in mine]
            )
            step.take(part, self._adams[number])
            self.history.judged += step.judged
            stats |= {one.number: step.stats(self._places[one.number][1]) for one in nodes if one.number in wishes}
        return stats

    def _group(self, scored: ScoredGroup) -> Group:
        rows = tuple(
            Row(c.tokens or self.codec.answer(c.text, c.finished), advantage, c.logprobs)
            for c, advantage in zip(scored.group.completions, scored.advantages, strict=True)
        )
        return Group(self.codec.prompt(scored.group.task.prompt), rows)

    async def measure(self, per_kind: int = 16, samples: int = 8) -> list[HeldOut]:
        """Each honest node on prompts that nobody trains on, sampled at temperature 1."""
        stream = await TaskStream.open(
            cast(Sandbox, self.verifiers), mix_of(self.files), seed=digest("held out"), held_out=True
        )
        tasks = [task for kind in range(len(stream.kinds)) for task in await stream.draw_distinct(kind, per_kind)]
        sampling = Sampling(samples, MAX_NEW_TOKENS)
        prompts = [self.codec.prompt(task.prompt) for task in tasks]
        sampled = self._sample({n: (prompts, sampling, digest(self.plan.seed, n)) for n in self.honest})
        found = []
        for node in self.honest:
            scores = [
                await self.verifiers.score(task, [self.codec.text(s.tokens) for s in group])
                for task, group in zip(tasks, sampled[node], strict=True)
            ]
            found.append(HeldOut(mean([s for group in scores for s in group]), mean([max(group) for group in scores])))
        return found
