"""The same spreading event by event, for few nodes: what the arrays of `bench.scaling.spread` are held against.

Without offers, which most batches do not need. All nodes may share one core, as real ones in one process do.
"""

import heapq
import math

from bench.scaling.graph import Graph
from bench.scaling.links import Links
from bench.scaling.spread import Cost


def spread_exactly(graph: Graph, links: Links, origin: int, cost: Cost, core: float = 0.0) -> tuple[list[float], int]:
    """When each slot of a single topic has a batch (infinite: never), and the copies that come in, in all.

    `core` seconds of the one core of all nodes go to every copy; 0 if each node has its own.
    """
    ways: dict[int, list[tuple[int, float]]] = {slot: [] for slot in range(graph.slots)}
    for source, target, seconds, in_mesh in zip(graph.source, graph.target, graph.one_way, graph.in_mesh, strict=True):
        if in_mesh:
            ways[int(source)].append((int(target), float(seconds)))
    arrival: dict[int, float] = {origin: 0.0}
    sender = {origin: origin}
    free, copies = 0.0, 0
    # (when, what, slot, from whom): a copy comes, is read, and the batch has been checked.
    events = [(0.0, "checked", origin, origin)]
    while events:
        when, what, slot, by = heapq.heappop(events)
        if what == "comes":
            copies += 1
            free = max(free, when) + core
            heapq.heappush(events, (free if core else when, "is read", slot, by))
        elif what == "is read" and slot not in arrival:
            arrival[slot], sender[slot] = when, by
            heapq.heappush(events, (when + cost.check, "checked", slot, by))
        elif what == "checked":
            told = {peer for peer, seconds in ways[slot] if arrival.get(peer, math.inf) + seconds < when}
            to = [way for way in ways[slot] if way[0] not in told | {origin, sender[slot]}]
            for peer, seconds in to:
                done = when + len(to) * cost.size / links.up[slot] + seconds + cost.size / links.down[peer]
                heapq.heappush(events, (done, "comes", peer, slot))
    return [arrival.get(slot, math.inf) for slot in range(graph.slots)], copies
