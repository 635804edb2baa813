"""Rollouts on gossip topics: which topics this node is on, and an outbox that sends at a pace others accept.

A node publishes on the topic of its own shard and listens to a fixed number of shards, so that what it receives stays
flat as the swarm grows.
"""

import hashlib
from collections.abc import Callable
from typing import NoReturn

import trio

from p2p.limits import Bucket
from p2p.transport import Transport, Verdict
from p2p.wire import VERSION, Envelope

OUTBOX = 256
"""Envelopes that wait to be sent: several large rounds. A node that makes more waits."""

RATE, BURST = 10.0, 50.0
"""Envelopes a second, and at once: half of what a receiver takes by default, so that it never has to refuse any."""

MESH_SECONDS = 3.0
"""How long an envelope waits for a mesh while others are subscribed: meshes are made once a second."""

_LOOK_SECONDS = 0.25
_EMPTIED_SECONDS = 0.05


def shard_of(peer: str, shards: int) -> int:
    """The shard on which a peer publishes."""
    return int.from_bytes(hashlib.sha256(peer.encode()).digest(), "big") % shards


def shards_heard(peer: str, shards: int, count: int) -> list[int]:
    """The shards that a peer listens to: its own, then those that follow it, so that all are heard by as many."""
    own = shard_of(peer, shards)
    return [(own + step) % shards for step in range(min(count, shards))]


def topic_of(swarm: str, shard: int) -> str:
    """The gossip topic of a shard."""
    return f"/swarmnode/{VERSION}/{swarm}/rollouts/{shard}"


def ready_topic(swarm: str) -> str:
    """The topic whose subscribers are ready to train. Nothing is ever published there."""
    return f"/swarmnode/{VERSION}/{swarm}/ready"


class Gossip:
    """`check(data, forwarder)` judges what comes in, and takes it in if it is good."""

    def __init__(
        self,
        transport: Transport,
        swarm: str,
        shards: int,
        subscribe: int,
        check: Callable[[bytes, str], Verdict],
        pace: tuple[float, float] = (RATE, BURST),
    ) -> None:
        """`pace`: own envelopes a second, and at once."""
        self._transport = transport
        self._check = check
        self._pace = pace
        self._heard = [topic_of(swarm, shard) for shard in shards_heard(transport.peer_id, shards, subscribe)]
        self._put, self._take = trio.open_memory_channel[Envelope](OUTBOX)
        self._patient = True
        self._taken = 0
        self.sent = 0
        """Envelopes that went out since the start, also if nobody was there."""

    @property
    def topic(self) -> str:
        """The topic on which this node publishes."""
        return self._heard[0]

    @property
    def waiting(self) -> int:
        """Envelopes in the outbox."""
        return self._put.statistics().current_buffer_used

    def mesh(self) -> set[str]:
        """Peers with which this node exchanges messages at once, on any topic."""
        return {peer for topic in self._heard for peer in self._transport.mesh(topic)}

    async def subscribe(self) -> None:
        """Join the topics, the own one first."""
        for topic in self._heard:
            await self._transport.subscribe(topic, self._validate, _delivered)

    async def publish(self, envelope: Envelope) -> None:
        """Put an own envelope into the outbox; waits only while that is full."""
        await self._put.send(envelope)
        self._taken += 1

    async def heard(self) -> None:
        """Returns when some peer is there to be told at once what this node publishes."""
        while not self._transport.mesh(self.topic):
            await trio.sleep(_LOOK_SECONDS)

    async def emptied(self) -> None:
        """Returns when all that has been published up to now has gone out."""
        taken = self._taken
        while self.sent < taken:
            await trio.sleep(_EMPTIED_SECONDS)

    async def run(self) -> NoReturn:
        """Empty the outbox, for ever."""
        pace = Bucket(*self._pace, trio.current_time())
        while True:
            envelope = await self._take.receive()
            while not pace.take(trio.current_time()):
                await trio.sleep(1 / self._pace[0])
            await self._mesh_made()
            await self._transport.publish(self.topic, envelope.data)
            self.sent += 1

    async def _mesh_made(self) -> None:
        """Give a mesh that is about to be made the time for it. Without subscribers there is nothing to wait for: who
        comes later catches up."""
        if self._transport.mesh(self.topic):
            self._patient = True
        elif self._patient:
            with trio.move_on_after(MESH_SECONDS):
                while not self._transport.mesh(self.topic) and self._transport.subscribers(self.topic):
                    await trio.sleep(_LOOK_SECONDS)
                return
            self._patient = False

    def _validate(self, forwarder: str, data: bytes) -> Verdict:
        return self._check(data, forwarder)


def _delivered(forwarder: str, data: bytes) -> None:
    """Nothing is left to do: whatever is accepted was taken in by the check."""
