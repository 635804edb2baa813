"""One swarm from its first node to its figures: it grows, nodes come and go, batches are followed."""

import heapq
import math
import random
import time
from collections.abc import Iterator, Sequence

import numpy as np

from bench.scaling.costs import Costs
from bench.scaling.graph import Graph, snapshot
from bench.scaling.links import Bools, Floats, Ints, draw
from bench.scaling.plan import Outcome, Plan, Spread
from bench.scaling.spread import BEAT, OFFERED, Cost, Wave, spread
from bench.scaling.topology import Net
from p2p import catchup, serving, store
from p2p.host import gossip as router

FRAMING = 1.01
"""Bytes of Noise and yamux on top of those of gossip, as measured between real nodes (`bench.scaling.real`)."""

MOMENTS = 4
"""Moments of a run at which batches are followed."""

NOTICE = 10.0, 15.0
"""Seconds until a node notices that another is gone without a word: the multiplexer asks every 5 and waits for 10."""

JOINING = 3.0
"""Seconds until a new node has its first connections."""

_PILOT = 2
_FULLEST = 0.95
"""Part of an uplink from which on it counts as full: a queue grows without end then, which is not simulated."""

_IDONTWANT = 60
_LISTED = serving.ENTRY_BYTES


class World:
    """A swarm that runs for `plan.seconds`."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan = plan
        self.costs = costs
        self._rng = np.random.default_rng(plan.seed)
        self._chance = random.Random(plan.seed)
        self.net = Net(plan, self._chance)
        self.net.grow(plan.nodes)
        self.moves = round(plan.churn * plan.nodes)
        most = plan.nodes + self.moves
        self.links = draw(most, plan.home, self._rng)
        self.beat = self._rng.random(most) * BEAT
        self.alive = np.zeros(most, dtype=np.bool_)
        self.alive[: plan.nodes] = True
        self.rides = self._rng.random(most) < plan.riders
        self.cost = Cost(costs.message * FRAMING, costs.check)

    def run(self) -> Outcome:
        """Follow batches, and say what was seen."""
        began = time.perf_counter()
        tally = _Tally(self)
        moments = self._moments() if self.moves else [self._now()]
        for graph in moments:
            load = self._load(graph)
            for _ in range(math.ceil(self.plan.messages / (MOMENTS if self.moves else 1))):
                tally.add(graph, *self._followed(graph, load), load)
        return tally.outcome(time.perf_counter() - began)

    def _now(self) -> Graph:
        return snapshot(self.net, self.links, self.alive[: len(self.net)], ~self.rides[: len(self.net)])

    def _moments(self) -> Iterator[Graph]:
        """Let nodes come and go, and show the swarm now and then."""
        plan, rng = self.plan, self._chance
        events: list[tuple[float, int, str, int]] = []
        for number, node in enumerate(rng.sample(range(plan.nodes), self.moves)):
            when = rng.uniform(0, plan.seconds)
            events.append((when, number, "leave", node))
            events.append((when + JOINING, number, "join", -1))
        shown = [(plan.seconds * (at + 1) / MOMENTS, -1, "show", -1) for at in range(MOMENTS)]
        queue = events + shown
        heapq.heapify(queue)
        while queue:
            when, number, what, node = heapq.heappop(queue)
            if what == "show":
                yield self._now()
            elif what == "leave":
                self.alive[node] = False
                self.net.hide(node)
                without_a_word = rng.random() < 0.5
                noticed = when + (rng.uniform(*NOTICE) if without_a_word else 0.0)
                heapq.heappush(queue, (noticed, number, "noticed", node))
            elif what == "noticed":
                peers = [peer for peer in self.net.leave(node) if self.alive[peer]]
                for peer in peers:
                    self.net.look(peer)
                self.net.beat(peers)
            else:
                new = self.net.add()
                self.alive[new] = True
                self.net.join(new)

    def _origins(self, graph: Graph) -> Ints:
        """A slot on each topic whose node publishes there: a subscriber by its own shard that gives."""
        heard = len(self.net.heard[0])
        own = np.arange(0, graph.slots, heard)
        able = own[graph.alive[own] & graph.gives[own]]
        able = self._rng.permutation(able)
        _, first = np.unique(graph.topic[able], return_index=True)
        return able[first]

    def _followed(self, graph: Graph, load: Floats) -> tuple[Ints, Wave]:
        origins = self._origins(graph)
        return origins, spread(graph, self.links, origins, self.cost, np.minimum(load, 0.9), self.beat, self._rng)

    def _load(self, graph: Graph) -> Floats:
        """The part of each node's uplink in use, from a few batches on idle links."""
        idle = np.zeros(len(self.links.up))
        waves = [self._followed(graph, idle)[1].copies_out for _ in range(_PILOT)]
        out = np.mean(waves, axis=0) * self.rates(graph)[graph.topic] * self.cost.size
        return np.bincount(graph.node, out, minlength=len(idle)) / self.links.up

    def rates(self, graph: Graph) -> Floats:
        """Batches a second on each topic."""
        heard = len(self.net.heard[0])
        own = np.arange(0, graph.slots, heard)
        able = own[graph.alive[own] & graph.gives[own]]
        return np.bincount(graph.topic[able], minlength=self.plan.shards) / self.plan.round_seconds


class _Tally:
    """Adds up what the followed batches did."""

    def __init__(self, world: World) -> None:
        self._world = world
        nodes = len(world.alive)
        self._in, self._out, self._control = np.zeros(nodes), np.zeros(nodes), np.zeros(nodes)
        self._got, self._due = np.zeros(nodes), np.zeros(nodes)
        self._present = np.zeros(nodes)
        self._rate = np.zeros(nodes)
        self._copies = self._arrived = 0
        self._halves: list[Floats] = []
        self._last: list[Floats] = []
        self._loads: list[Floats] = []
        self._mesh: list[float] = []
        self._connections: list[float] = []
        self._followed = 0
        self._waves = 0

    def add(self, graph: Graph, origins: Ints, wave: Wave, load: Floats) -> None:
        """One batch on each topic."""
        world, nodes = self._world, len(self._in)
        rate = world.rates(graph)[graph.topic]
        heard = graph.alive.copy()
        heard[origins] = False
        # A topic on which nobody publishes has no batch to miss.
        published = np.zeros(world.plan.shards, dtype=np.bool_)
        published[graph.topic[origins]] = True
        heard &= published[graph.topic]
        arrived = heard & np.isfinite(wave.arrival)
        self._in += np.bincount(graph.node, wave.copies_in * rate * world.cost.size, minlength=nodes)
        self._out += np.bincount(graph.node, wave.copies_out * rate * world.cost.size, minlength=nodes)
        self._control += np.bincount(graph.node, chatter(graph, rate, world.costs), minlength=nodes)
        self._got += np.bincount(graph.node, arrived * rate, minlength=nodes)
        self._due += np.bincount(graph.node, heard * rate, minlength=nodes)
        self._rate += np.bincount(graph.node, heard * rate, minlength=nodes)
        alive = np.bincount(graph.node, graph.alive, minlength=nodes) > 0
        self._present += alive
        self._copies += int(wave.copies_in[arrived].sum())
        self._arrived += int(arrived.sum())
        half, last = _halves(graph, heard, wave.arrival)
        self._halves.append(half)
        self._last.append(last)
        self._loads.append(load[alive])
        self._mesh.append(float(graph.degree[graph.alive].mean()))
        self._followed += len(origins)
        self._waves += 1

    def outcome(self, seconds: float) -> Outcome:
        """All of it, over the nodes that were there."""
        world, there = self._world, self._present > 0
        waves = self._present[there]
        control = self._control[there] / waves
        bytes_in, bytes_out = (total[there] / waves + control for total in (self._in, self._out))
        rate = self._got[there] / waves
        visits, first = self._catch_up(float(rate.mean()))
        bytes_in, bytes_out = bytes_in + visits, bytes_out + visits
        bytes_in, bytes_out = self._with_first_visits(there, bytes_in, bytes_out, first)
        share = self._got[there] / np.maximum(self._due[there], 1e-12)
        listening = self._due[there] > 0
        half, last = np.concatenate(self._halves), np.concatenate(self._last)
        reached = half[np.isfinite(half)]
        load = np.concatenate(self._loads)
        degree = np.array([len(links) for links in world.net.links])[there[: len(world.net)]]
        published = float(world.rates(world._now()).sum())
        return Outcome(
            _over(bytes_in),
            _over(bytes_out),
            float(control.mean()),
            visits + first * world.moves / world.plan.seconds / world.plan.nodes,
            float(rate.mean()),
            self._copies / max(self._arrived, 1),
            float(np.mean(self._mesh)),
            _over(degree[degree > 0]),
            float(share[listening].mean()),
            float(np.percentile(share[listening], 1)),
            float((rate + ~world.rides[: len(there)][there] / world.plan.round_seconds).mean()) / published,
            Spread(float(reached.mean()) if len(reached) else math.inf, _percentile(half, 99)),
            float(reached.mean()) + self._admission(float(rate.mean())) if len(reached) else math.inf,
            float(last[np.isfinite(last)].mean()) if np.isfinite(last).any() else math.inf,
            float(load.mean()),
            float((load > _FULLEST).mean()),
            self._followed,
            seconds,
        )

    def _admission(self, rate: float) -> float:
        """Seconds from a batch's coming to its being in the pool: one queue, batches alike (M/D/1)."""
        service = self._world.costs.admit
        load = rate * service
        return service + load * service / (2 * (1 - load)) if load < 1 else math.inf

    def _catch_up(self, rate: float) -> tuple[float, float]:
        """Bytes a second of visits to peers that have nothing new, and the bytes of a new node's first visits."""
        plan = self._world.plan
        # A peer's turn comes again after so long that all of the last ten minutes is listed.
        listed = min(rate * catchup.FIRST_AGE, serving.MAX_LISTED)
        visits = listed * _LISTED / catchup.EVERY
        size = self._world.costs.envelope
        held = min(rate * min(catchup.FIRST_AGE, plan.seconds) * size, store.MAX_BYTES, store.MAX_COUNT * size)
        return visits, held

    def _with_first_visits(
        self, there: Bools, bytes_in: Floats, bytes_out: Floats, first: float
    ) -> tuple[Floats, Floats]:
        """New nodes take what they missed, from those that are there."""
        world = self._world
        if world.moves:
            new = np.flatnonzero(there) >= world.plan.nodes
            bytes_in = bytes_in + np.where(new, first / world.plan.seconds, 0.0)
            bytes_out = bytes_out + first * world.moves / world.plan.seconds / world.plan.nodes
        return bytes_in, bytes_out


def chatter(graph: Graph, rate: Floats, costs: Costs) -> Floats:
    """Bytes a second of IHAVE and IDONTWANT that a slot sends, and gets, with `rate` batches a second on its topic."""
    chosen = np.maximum(router._GOSSIP_PEERS, router._GOSSIP_FRACTION * graph.others)
    peers = np.minimum(graph.others, chosen)
    ids = np.minimum(rate * OFFERED * BEAT, router._MAX_OFFER)
    offers = peers * (costs.offer * np.minimum(ids, 1) + ids * costs.offer_id) / BEAT
    told = rate * np.maximum(graph.degree - 1, 0) * _IDONTWANT
    total: Floats = np.where(graph.alive, np.where(graph.gives, offers, 0.0) + told, 0.0)
    return total


def _halves(graph: Graph, heard: Bools, arrival: Floats) -> tuple[Floats, Floats]:
    """For each topic with a batch: when half of its subscribers had it, and when the last of those that got it."""
    slots = np.flatnonzero(heard)
    order = slots[np.lexsort((arrival[slots], graph.topic[slots]))]
    _, starts, counts = np.unique(graph.topic[order], return_index=True, return_counts=True)
    half = arrival[order[starts + (counts + 1) // 2 - 1]]
    finite = np.where(np.isfinite(arrival[order]), arrival[order], -np.inf)
    return half, np.maximum.reduceat(finite, starts) if len(starts) else half


def _over(values: Floats | Sequence[float]) -> Spread:
    return Spread(float(np.mean(values)), _percentile(values, 99))


def _percentile(values: Floats | Sequence[float], which: float) -> float:
    # Of infinite values numpy makes no number where it has to go between them.
    return float(np.percentile(np.asarray(values), which, method="higher")) if len(values) else math.nan
