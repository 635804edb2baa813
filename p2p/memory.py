"""A network in memory with the behaviour of a real one: for tests, and for trying things without sockets.

Messages flood over the graph of connections. Addresses look like loopback TCP ones, so that whatever reads multiaddrs
works unchanged. Everything runs in trio's time, so a test with a mock clock does in milliseconds what takes minutes.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from p2p.transport import (
    Connection,
    Deliver,
    FrameTooLong,
    Observer,
    Serve,
    TransportError,
    Validate,
    Verdict,
)

MAX_MESSAGE = 320 * 1024
STREAM_SECONDS = 15.0
"""Longest wait for one frame."""

_FRAMES = 16  # in flight in one direction of a stream
_MAX_SEEN = 2**16


class MemoryNetwork:
    """Who is there and who is connected. `nursery` owns the tasks that answer streams.

    `drop_every` = k loses every k-th hop of a gossip message; `identify_seconds` after connecting a peer's protocols
    become known, and after `mesh_seconds` it is in the mesh.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self.drop_every = 0
        self.identify_seconds = 0.0
        self.mesh_seconds = 0.0
        self._nursery = nursery
        self._members: dict[str, MemoryTransport] = {}
        self._links: dict[frozenset[str], _Link] = {}
        self._cut: set[frozenset[str]] = set()
        self._hops = 0
        self._joined = 0

    def join(self, peer_id: str, observer: Observer) -> "MemoryTransport":
        """A place in the network for a peer that is not there yet."""
        if peer_id in self._members:
            raise ValueError(f"{peer_id} is there already")
        self._joined += 1
        member = MemoryTransport(self, peer_id, observer, f"/ip4/127.0.0.1/tcp/{self._joined}")
        self._members[peer_id] = member
        return member

    def leave(self, peer_id: str) -> None:
        """A peer goes away at once, as if killed."""
        for other in [*self._members]:
            self._unlink(peer_id, other)
        del self._members[peer_id]

    def cut(self, one: str, other: str) -> None:
        """Close the connection between two peers, and let none through until `heal`."""
        self._cut.add(frozenset((one, other)))
        self._unlink(one, other)

    def heal(self, one: str, other: str) -> None:
        """Undo `cut`."""
        self._cut.discard(frozenset((one, other)))

    def _at(self, address: str) -> "MemoryTransport":
        place, _, peer = address.partition("/p2p/")
        for member in self._members.values():
            if member.place == place and peer in ("", member.peer_id):
                return member
        raise TransportError(f"nobody answers at {address}")

    def _link(self, dialler: "MemoryTransport", other: "MemoryTransport") -> None:
        pair = frozenset((dialler.peer_id, other.peer_id))
        if pair in self._links:
            return
        if pair in self._cut or dialler.peer_id in other.blocked or other.peer_id in dialler.blocked:
            raise TransportError(f"{other.peer_id[-8:]} does not answer")
        self._links[pair] = _Link(dialler.peer_id, trio.current_time())
        dialler.observer.connected(other.peer_id)
        other.observer.connected(dialler.peer_id)

    def _unlink(self, one: str, other: str) -> None:
        link = self._links.pop(frozenset((one, other)), None)
        if link is None:
            return
        for stream in [*link.streams]:
            stream.close()
        self._members[one].observer.disconnected(other)
        self._members[other].observer.disconnected(one)

    def _loses(self) -> bool:
        self._hops += 1
        return self.drop_every > 0 and self._hops % self.drop_every == 0


class MemoryTransport:
    """p2p.transport.Transport in a `MemoryNetwork`, which makes it."""

    def __init__(self, network: MemoryNetwork, peer_id: str, observer: Observer, place: str) -> None:
        self.observer = observer
        self.place = place
        self.blocked: set[str] = set()
        self._network = network
        self._peer_id = peer_id
        self._topics: dict[str, tuple[Validate, Deliver]] = {}
        self._handlers: dict[str, Serve] = {}
        self._seen: dict[tuple[str, int], None] = {}
        self._published = 0

    @property
    def peer_id(self) -> str:
        """This peer's id."""
        return self._peer_id

    def addresses(self) -> list[str]:
        """The one address under which it is reached."""
        return [f"{self.place}/p2p/{self._peer_id}"]

    def connections(self) -> list[Connection]:
        """The connected peers."""
        now = trio.current_time()
        return [
            Connection(peer, self._network._members[peer].place, link.dialler == self._peer_id, now - link.since)
            for pair, link in self._network._links.items()
            if self._peer_id in pair
            for peer in pair - {self._peer_id}
        ]

    async def connect(self, address: str) -> str:
        """See Transport."""
        await trio.lowlevel.checkpoint()
        other = self._network._at(address)
        if other is not self:
            self._network._link(self, other)
        return other.peer_id

    async def disconnect(self, peer: str) -> None:
        """See Transport."""
        await trio.lowlevel.checkpoint()
        self._network._unlink(self._peer_id, peer)

    def block(self, peer: str) -> None:
        """See Transport."""
        self.blocked.add(peer)
        self._network._unlink(self._peer_id, peer)

    def unblock(self, peer: str) -> None:
        """See Transport."""
        self.blocked.discard(peer)

    async def subscribe(self, topic: str, validate: Validate, deliver: Deliver) -> None:
        """See Transport."""
        await trio.lowlevel.checkpoint()
        self._topics[topic] = (validate, deliver)

    async def publish(self, topic: str, data: bytes) -> int:
        """See Transport."""
        await trio.lowlevel.checkpoint()
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(data)} bytes, {MAX_MESSAGE} are allowed")
        self._published += 1
        name = (self._peer_id, self._published)
        self._seen[name] = None
        return self._pass_on(topic, name, data)

    def mesh(self, topic: str) -> list[str]:
        """All that are subscribed, for a topic that this peer has joined."""
        return self._subscribed(topic, self._network.mesh_seconds) if topic in self._topics else []

    def subscribers(self, topic: str) -> list[str]:
        """See Transport."""
        return self._subscribed(topic, 0.0)

    def serve(self, protocol: str, handler: Serve) -> None:
        """See Transport."""
        self._handlers[protocol] = handler

    @asynccontextmanager
    async def open(self, peer: str, protocol: str) -> AsyncIterator["MemoryStream"]:
        """See Transport."""
        await trio.lowlevel.checkpoint()
        link = self._network._links.get(frozenset((self._peer_id, peer)))
        if link is None:
            raise TransportError(f"{peer[-8:]} is not connected")
        handler = self._network._members[peer]._handlers.get(protocol)
        if handler is None:
            raise TransportError(f"{peer[-8:]} does not speak {protocol}")
        there, back = trio.open_memory_channel[bytes](_FRAMES), trio.open_memory_channel[bytes](_FRAMES)
        ours, theirs = MemoryStream(peer, there[0], back[1], link), MemoryStream(self._peer_id, back[0], there[1], link)
        self._network._nursery.start_soon(_answer, handler, theirs)
        try:
            yield ours
        finally:
            ours.close()

    def protocols(self, peer: str) -> Sequence[str]:
        """See Transport."""
        link = self._network._links.get(frozenset((self._peer_id, peer)))
        if link is None or trio.current_time() - link.since < self._network.identify_seconds:
            return []
        return [*self._network._members[peer]._handlers]

    def _subscribed(self, topic: str, seconds: float) -> list[str]:
        return [
            connection.peer
            for connection in self.connections()
            if connection.seconds >= seconds and topic in self._network._members[connection.peer]._topics
        ]

    def _pass_on(self, topic: str, name: tuple[str, int], data: bytes) -> int:
        peers = self._subscribed(topic, self._network.mesh_seconds)
        for peer in peers:
            if not self._network._loses():
                self._network._members[peer]._receive(self._peer_id, topic, name, data)
        return len(peers)

    def _receive(self, forwarder: str, topic: str, name: tuple[str, int], data: bytes) -> None:
        joined = self._topics.get(topic)
        if joined is None or name in self._seen or name[0] in self.blocked or forwarder in self.blocked:
            return
        self._seen[name] = None
        if len(self._seen) > _MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        validate, deliver = joined
        if validate(forwarder, data) is Verdict.ACCEPT:
            deliver(forwarder, data)
            self._pass_on(topic, name, data)


class MemoryStream:
    """p2p.transport.Stream over two channels."""

    def __init__(
        self,
        peer: str,
        out: trio.MemorySendChannel[bytes],
        into: trio.MemoryReceiveChannel[bytes],
        link: "_Link",
    ) -> None:
        self._peer = peer
        self._out = out
        self._into = into
        self._link = link
        link.streams.append(self)

    @property
    def peer(self) -> str:
        """Who is at the other end."""
        return self._peer

    async def send(self, frame: bytes) -> None:
        """See Stream."""
        try:
            with trio.fail_after(STREAM_SECONDS):
                await self._out.send(frame)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise TransportError(f"{self._peer[-8:]} closed the stream") from None
        except trio.TooSlowError:
            raise TransportError(f"{self._peer[-8:]} does not read") from None

    async def receive(self, limit: int) -> bytes:
        """See Stream."""
        try:
            with trio.fail_after(STREAM_SECONDS):
                frame = await self._into.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise TransportError(f"{self._peer[-8:]} closed the stream") from None
        except trio.TooSlowError:
            raise TransportError(f"{self._peer[-8:]} says nothing") from None
        if len(frame) > limit:
            raise FrameTooLong(f"{self._peer[-8:]} sent a frame of {len(frame)} bytes where {limit} are allowed")
        return frame

    def close(self) -> None:
        """Close both directions."""
        self._out.close()
        self._into.close()
        if self in self._link.streams:
            self._link.streams.remove(self)


@dataclass
class _Link:
    dialler: str
    since: float
    streams: list[MemoryStream] = field(default_factory=list)


async def _answer(handler: Serve, stream: MemoryStream) -> None:
    try:
        await handler(stream)
    except TransportError:
        pass  # as the protocol of Serve says
    finally:
        stream.close()
