"""A moment of a swarm as arrays: places of nodes in topics, and the ways between them.

A *slot* is a node in one of the topics that it hears; slots are numbered. A *way* leads from one slot to another of the
same topic whose nodes are connected, in one direction; each has its counterpart.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.scaling.links import Bools, Floats, Ints, Links
from bench.scaling.topology import Net


@dataclass(frozen=True)
class Graph:
    """Ways are sorted by where they lead to; `starts` are the first ways of the slots `ends`, which have any."""

    node: Ints
    topic: Ints
    source: Ints
    target: Ints
    in_mesh: Bools
    one_way: Floats
    counterpart: Ints
    starts: Ints
    ends: Ints
    alive: Bools
    """Of each slot: its node is there. Others may not have noticed that it is not."""
    gives: Bools
    """Of each slot: its node passes on what it gets."""
    degree: Ints
    """Of each slot: peers in its mesh."""
    others: Ints
    """Of each slot: connected subscribers that are not in its mesh."""

    @property
    def slots(self) -> int:
        """How many there are."""
        return len(self.node)


def build(
    node: Ints,
    topic: Ints,
    source: Ints,
    target: Ints,
    in_mesh: Bools,
    one_way: Callable[[Ints, Ints], Floats],
    alive: Bools,
    gives: Bools,
) -> Graph:
    """Arrange ways, of which each must be there in both directions. `alive` and `gives` are of nodes."""
    order = np.lexsort((source, target))
    source, target, in_mesh = source[order], target[order], in_mesh[order]
    slots = len(node)
    # Sorted by (target, source): where (source, target) stands is the counterpart.
    keys = target * slots + source
    counterpart = np.searchsorted(keys, source * slots + target)
    ends, starts = np.unique(target, return_index=True)
    return Graph(
        node,
        topic,
        source,
        target,
        in_mesh,
        one_way(node[source], node[target]),
        counterpart,
        starts,
        ends,
        alive[node],
        gives[node],
        np.bincount(source[in_mesh], minlength=slots),
        np.bincount(source[~in_mesh], minlength=slots),
    )


def snapshot(net: Net, links: Links, alive: Bools, gives: Bools) -> Graph:
    """A swarm as it is now. Nodes that never joined or are forgotten have no ways."""
    heard = net.plan.subscribe if net.plan.subscribe < net.plan.shards else net.plan.shards
    source: list[int] = []
    target: list[int] = []
    in_mesh: list[bool] = []
    for node in range(len(net)):
        for place, shard in enumerate(net.heard[node]):
            mesh, slot = net.mesh[node][place], node * heard + place
            for peer in net.others(node, place):
                source.append(slot)
                target.append(peer * heard + net.heard[peer].index(shard))
                in_mesh.append(peer in mesh)
    topics = np.array(net.heard, dtype=np.int64).reshape(-1)
    nodes = np.repeat(np.arange(len(net)), heard)
    ways = np.array(source, dtype=np.int64), np.array(target, dtype=np.int64), np.array(in_mesh, dtype=np.bool_)
    return build(nodes, topics, *ways, links.between, alive, gives)
