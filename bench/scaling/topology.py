"""Who is connected with whom, and who is in whose mesh, by the product's rules: `p2p.discovery` and `p2p.host.gossip`.

Nodes come and go one by one. What the rules decide by score is decided by chance here, since all scores are equal.
"""

import random
from collections.abc import Iterable, Iterator

from bench.scaling.plan import Plan
from p2p.discovery import CHOSEN, SHARD_CHOSEN, SHARD_TARGET, TARGET
from p2p.gossip import shard_of, shards_heard
from p2p.host import gossip as router
from p2p.settings import NetworkSettings

LOW, DEGREE, HIGH = router._DEGREE_LOW, router._DEGREE, router._DEGREE_HIGH
MAX_PEERS: int = NetworkSettings().max_peers
MAX_INBOUND = MAX_PEERS - MAX_PEERS // 4
_BEATS = 3
_TRIES = 40  # addresses that a node tries for one connection


class Net:
    """Nodes by number. `heard[node]` are its shards, the own one first; `mesh[node][place]` its mesh in one of them."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self.plan = plan
        self._rng = rng
        self.heard: list[list[int]] = []
        self.links: list[dict[int, bool]] = []
        """Peer -> whether this node has dialled it."""
        self.mesh: list[list[set[int]]] = []
        self._inbound: list[int] = []
        self._there = _Bag()
        self._of_shard = [_Bag() for _ in range(plan.shards)]

    def __len__(self) -> int:
        return len(self.heard)

    def grow(self, nodes: int) -> None:
        """So many nodes join, one after the other, and all meshes settle."""
        for _ in range(nodes):
            self.join(self.add())
        # The first had few to choose from, and go on looking.
        for node in range(len(self)):
            self.look(node)
        # Who asked a full mesh asks others then.
        for _ in range(_BEATS):
            self.beat(range(len(self)))

    def add(self) -> int:
        """A node with an identity of its own that is not connected yet. Returns its number."""
        node = len(self)
        name = f"{self.plan.seed}/{node}"
        self.heard.append(shards_heard(name, self.plan.shards, self.plan.subscribe))
        assert self.heard[node][0] == shard_of(name, self.plan.shards)
        self.links.append({})
        self.mesh.append([set() for _ in self.heard[node]])
        self._inbound.append(0)
        return node

    def join(self, node: int) -> None:
        """Look for connections, and be found from now on."""
        self.look(node)
        self._there.add(node)
        self._of_shard[self.heard[node][0]].add(node)

    def look(self, node: int) -> None:
        """Dial until there are connections enough: for each shard, where nodes look for these, and in all."""
        links = self.links[node]
        if self.plan.looking:
            for shard in self.heard[node]:
                made = [dialled for peer, dialled in links.items() if self.heard[peer][0] == shard]
                self._dial(node, self._of_shard[shard], max(SHARD_TARGET - len(made), SHARD_CHOSEN - sum(made)))
        self._dial(node, self._there, max(TARGET - len(links), CHOSEN - sum(links.values())))

    def leave(self, node: int) -> list[int]:
        """All connections of a node end. Returns who it was connected with."""
        peers = list(self.links[node])
        self.hide(node)
        for peer in peers:
            self._cut(node, peer)
        return peers

    def hide(self, node: int) -> None:
        """A node is gone: who dials it has no answer. Its connections stand until others notice."""
        self._there.drop(node)
        self._of_shard[self.heard[node][0]].drop(node)

    def beat(self, nodes: Iterable[int]) -> None:
        """A heartbeat: meshes that are too small are filled, and those too large are thinned."""
        for node in nodes:
            for place, mesh in enumerate(self.mesh[node]):
                self._fill(node, place)
                if len(mesh) > HIGH:
                    for peer in self._rng.sample(sorted(mesh), len(mesh) - DEGREE):
                        self._prune(node, place, peer)

    def others(self, node: int, place: int) -> Iterator[int]:
        """Connected subscribers of a shard, in the mesh or not."""
        return iter(self._subscribed(node, place))

    def _subscribed(self, node: int, place: int) -> list[int]:
        shard = self.heard[node][place]
        return [peer for peer in self.links[node] if shard in self.heard[peer]]

    def _dial(self, node: int, among: "_Bag", count: int) -> None:
        tries = _TRIES
        while count > 0 and tries and len(among) and len(self.links[node]) < MAX_PEERS:
            peer = among.draw(self._rng)
            tries -= 1
            if peer != node and peer not in self.links[node] and self._inbound[peer] < MAX_INBOUND:
                self._connect(node, peer)
                count -= 1

    def _connect(self, node: int, peer: int) -> None:
        self.links[node][peer] = True
        self.links[peer][node] = False
        self._inbound[peer] += 1
        for one in (node, peer):
            other = peer if one == node else node
            for place, shard in enumerate(self.heard[one]):
                if shard in self.heard[other]:
                    self._fill(one, place)

    def _cut(self, node: int, peer: int) -> None:
        dialled = self.links[node].pop(peer)
        del self.links[peer][node]
        self._inbound[peer if dialled else node] -= 1
        for one, other in ((node, peer), (peer, node)):
            for mesh in self.mesh[one]:
                mesh.discard(other)

    def _fill(self, node: int, place: int) -> None:
        mesh = self.mesh[node][place]
        if len(mesh) >= LOW:
            return
        others = [peer for peer in self._subscribed(node, place) if peer not in mesh]
        shard = self.heard[node][place]
        for peer in self._rng.sample(others, min(len(others), DEGREE - len(mesh))):
            theirs = self.mesh[peer][self.heard[peer].index(shard)]
            if len(theirs) < HIGH or self.links[peer][node]:
                mesh.add(peer)
                theirs.add(node)

    def _prune(self, node: int, place: int, peer: int) -> None:
        shard = self.heard[node][place]
        self.mesh[node][place].discard(peer)
        self.mesh[peer][self.heard[peer].index(shard)].discard(node)


class _Bag:
    """Numbers, one of which can be drawn at random."""

    def __init__(self) -> None:
        self._items: list[int] = []
        self._place: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: int) -> None:
        self._place[item] = len(self._items)
        self._items.append(item)

    def drop(self, item: int) -> None:
        place = self._place.pop(item, None)
        if place is None:
            return
        last = self._items.pop()
        if last != item:
            self._items[place] = last
            self._place[last] = place

    def draw(self, rng: random.Random) -> int:
        return self._items[int(rng.random() * len(self._items))]
