"""How one batch on every topic spreads, all topics at once: who has it when, and how many copies travel.

Times are exact for each way (check, what is before it in the sender's uplink, the copies of this batch, latency), and
the earliest of them all are found together over arrays, by relaxing every way until nothing changes. What no mesh has
brought comes by offers at heartbeats. The rules are those of `p2p.host.gossip`.
"""

from dataclasses import dataclass

import numpy as np

from bench.scaling.graph import Graph
from bench.scaling.links import Bools, Floats, Ints, Links
from p2p.host import cache
from p2p.host import gossip as router

BEAT = 1.0
"""Seconds between heartbeats."""

OFFERED: int = cache._OFFERED
_ROUNDS = (
    3  # of finding times and then who sends: how many copies share an uplink depends on the times, and these on it
)
_MOST_HOPS = 200


@dataclass(frozen=True)
class Cost:
    """`size` bytes travel for a batch; `check` seconds pass in a node before it passes a batch on."""

    size: float
    check: float


@dataclass(frozen=True)
class Wave:
    """`arrival` in seconds (infinite: never) and copies in and out, of each slot; `asked` of these in are answers."""

    arrival: Floats
    copies_in: Ints
    copies_out: Ints
    asked: Ints


def spread(
    graph: Graph, links: Links, origins: Ints, cost: Cost, load: Floats, beat: Floats, rng: np.random.Generator
) -> Wave:
    """One batch from each slot of `origins`, one at most a topic, at time 0.

    `load` is the part of each node's uplink that is in use (below 1), `beat` when in a second its heart beats.
    """
    return _Spreading(graph, links, origins, cost, load, beat, rng).run()


class _Spreading:
    def __init__(
        self,
        graph: Graph,
        links: Links,
        origins: Ints,
        cost: Cost,
        load: Floats,
        beat: Floats,
        rng: np.random.Generator,
    ) -> None:
        self.graph = graph
        self.origins = origins
        self.is_origin = np.zeros(graph.slots, dtype=np.bool_)
        self.is_origin[origins] = True
        self.check = np.where(self.is_origin, 0.0, cost.check)
        # A rider's own batch does not exist, so what it has goes nowhere.
        sends = graph.gives & graph.alive
        # Who publishes with a mesh that is too small sends to other subscribers too.
        small = self.is_origin & (graph.degree < router._DEGREE_LOW)
        self.direct = (graph.in_mesh | small[graph.source]) & sends[graph.source]
        self.lazy = ~graph.in_mesh & sends[graph.source]
        self.hears = graph.alive[graph.target] & ~self.is_origin[graph.target]
        self.copy_up = (cost.size / links.up)[graph.node]
        self.copy_down = (cost.size / links.down)[graph.node]
        self.wait = _waits(load[graph.node], self.copy_up * np.maximum(graph.degree, 1), rng)
        self.beat = beat[graph.node]
        self.missed = self._offers_missed(rng)

    def run(self) -> Wave:
        out = np.maximum(self.graph.degree - 1, 1)
        for _ in range(_ROUNDS):
            arrival = self._arrivals(out)
            sent = self._sent(arrival, out)
            out = np.bincount(self.graph.source[sent], minlength=self.graph.slots)
        return self._counted(arrival, sent)

    def _arrivals(self, out: Ints) -> Floats:
        graph = self.graph
        arrival = np.full(graph.slots, np.inf)
        arrival[self.origins] = 0.0
        for _ in range(_MOST_HOPS):
            times = np.where(self.hears, self._times(arrival, out), np.inf)
            best = np.minimum.reduceat(times, graph.starts) if len(times) else times
            better = best < arrival[graph.ends]
            if not better.any():
                break
            arrival[graph.ends[better]] = best[better]
        return arrival

    def _times(self, arrival: Floats, out: Ints) -> Floats:
        """When a batch comes over each way."""
        graph = self.graph
        ready = arrival + self.check
        # The copies of one batch share the uplink, so all of them are through at the same time.
        gone = ready + self.wait + np.maximum(out, 1) * self.copy_up
        last = graph.one_way + self.copy_down[graph.target]
        pushed = np.where(self.direct, gone[graph.source] + last, np.inf)
        asked = self._offered(ready) + 2 * graph.one_way + (self.wait + self.copy_up)[graph.source] + last
        times: Floats = np.minimum(pushed, asked)
        return times

    def _offered(self, ready: Floats) -> Floats:
        """When an offer of the batch leaves on each way: at a heartbeat after it came."""
        first = np.ceil((ready - self.beat) / BEAT) * BEAT + self.beat
        return np.where(self.lazy, first[self.graph.source] + self.missed, np.inf)

    def _offers_missed(self, rng: np.random.Generator) -> Floats:
        """Seconds until the heartbeat that chooses a peer for the offer; infinite if none does as long as it lasts."""
        others = self.graph.others[self.graph.source]
        chosen = np.maximum(router._GOSSIP_PEERS, router._GOSSIP_FRACTION * others)
        chance = np.minimum(chosen / np.maximum(others, 1), 1.0)
        beats = rng.geometric(chance) - 1
        return np.where(beats < OFFERED, beats * BEAT, np.inf)

    def _parents(self, arrival: Floats, out: Ints) -> Bools:
        """The ways over which the first copy came: one at most for each slot."""
        times = self._times(arrival, out)
        first = np.isfinite(times) & self.hears & (times <= arrival[self.graph.target])
        _, place = np.unique(self.graph.target[first], return_index=True)
        found = np.zeros(len(times), dtype=np.bool_)
        found[np.flatnonzero(first)[place]] = True
        return found

    def _sent(self, arrival: Floats, out: Ints) -> Bools:
        """The ways of the mesh over which a copy goes."""
        graph = self.graph
        ready = (arrival + self.check)[graph.source]
        # It had the batch first, and its word of that was there in time.
        told = arrival[graph.target] + graph.one_way < ready
        back = self._parents(arrival, out)[graph.counterpart]
        sent: Bools = self.direct & np.isfinite(ready) & ~told & ~back & ~self.is_origin[graph.target]
        return sent

    def _counted(self, arrival: Floats, sent: Bools) -> Wave:
        graph = self.graph
        there = sent & graph.alive[graph.target]
        copies_in = np.bincount(graph.target[there], minlength=graph.slots)
        copies_out = np.bincount(graph.source[sent], minlength=graph.slots)
        offer = np.where(self.hears, self._offered(arrival + self.check) + graph.one_way, np.inf)
        asked = np.zeros(graph.slots, dtype=np.int64)
        if len(offer):
            earliest = np.minimum.reduceat(offer, graph.starts)
            wants = np.isfinite(earliest) & (earliest < arrival[graph.ends])
            asked[graph.ends[wants]] = 1
            first = np.isfinite(offer) & (offer == np.repeat(earliest, np.diff(np.append(graph.starts, len(offer)))))
            _, place = np.unique(graph.target[first], return_index=True)
            ways = np.flatnonzero(first)[place]
            ways = ways[asked[graph.target[ways]] == 1]
            copies_out += np.bincount(graph.source[ways], minlength=graph.slots)
        return Wave(arrival, copies_in + asked, copies_out, asked)


def _waits(load: Floats, service: Floats, rng: np.random.Generator) -> Floats:
    """Seconds behind other batches in an uplink: the wait of a queue whose services are alike (M/D/1)."""
    mean = service / (2 * (1 - load))
    return np.where(rng.random(len(load)) < load, rng.exponential(1.0, len(load)) * mean, 0.0)
