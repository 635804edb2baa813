"""What the swarm needs from a network: a small protocol that `p2p.host` serves with libp2p and `p2p.memory` without.

Peers are named by their libp2p peer id, which for the Ed25519 keys of this protocol holds the public key itself. No
type of libp2p crosses this line.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Verdict(Enum):
    """What becomes of a gossip message: passed on, dropped in silence, or dropped at its forwarder's cost."""

    ACCEPT = "accept"
    IGNORE = "ignore"
    REJECT = "reject"


class TransportError(Exception):
    """A peer could not be reached, went away, was too slow or broke the protocol. The message says which."""


class FrameTooLong(TransportError):
    """A peer sent a longer frame than it may: its fault, where other errors may be the network's."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A connected peer. `address` is a multiaddr without the peer id; `seconds` is how long the connection stands."""

    peer: str
    address: str
    outbound: bool
    seconds: float


class Stream(Protocol):
    """One bidirectional stream with a peer, of bounded frames. Every wait has a deadline."""

    @property
    def peer(self) -> str:
        """Who is at the other end; proven by the connection's handshake."""
        ...

    async def send(self, frame: bytes) -> None:
        """Send one frame. Raises TransportError."""
        ...

    async def receive(self, limit: int) -> bytes:
        """The next frame, of at most `limit` bytes. Raises TransportError, for a longer one FrameTooLong."""
        ...


Validate = Callable[[str, bytes], Verdict]
"""Judges a gossip message, given the peer that passed it on: cheap, and called once a message. Must not raise."""

Deliver = Callable[[str, bytes], None]
"""Told of each accepted message once, given the peer that passed it on. Must not raise and must not wait."""

Serve = Callable[[Stream], Awaitable[None]]
"""Answers one stream that a peer opened. The stream is closed when it returns; a TransportError ends it quietly."""


class Observer(Protocol):
    """Told what happens on the network, from the event loop. Must not raise and must not wait."""

    def connected(self, peer: str) -> None:
        """The first connection with a peer stands."""
        ...

    def disconnected(self, peer: str) -> None:
        """The last connection with a peer is gone."""
        ...

    def misbehaved(self, peer: str, what: str) -> None:
        """A peer broke the protocol below ours: garbage for protobuf, a bad gossip signature, too large a message."""
        ...


class Transport(Protocol):
    """A node's place in the network."""

    @property
    def peer_id(self) -> str:
        """This node's own peer id."""
        ...

    def addresses(self) -> list[str]:
        """Multiaddrs under which this node listens, each ending in `/p2p/<peer id>`."""
        ...

    def connections(self) -> list[Connection]:
        """The connected peers, each once."""
        ...

    async def connect(self, address: str) -> str:
        """Dial a multiaddr ending in `/p2p/<peer id>`, unless connected. Returns the peer id. Raises TransportError.

        Without a peer id, whoever answers there is connected; if that is this node itself, nothing is done."""
        ...

    async def disconnect(self, peer: str) -> None:
        """Close all connections with a peer."""
        ...

    def block(self, peer: str) -> None:
        """Close all connections with a peer, soon, and refuse new ones until `unblock`. Its messages are dropped,
        whoever passes them on."""
        ...

    def unblock(self, peer: str) -> None:
        """Undo `block`."""
        ...

    async def subscribe(self, topic: str, validate: Validate, deliver: Deliver) -> None:
        """Join a gossip topic."""
        ...

    async def publish(self, topic: str, data: bytes) -> int:
        """Send to a topic's mesh, waiting for room in every peer's queue; a peer whose queue stays full is dropped
        from the connections rather than waited for. Returns to how many peers it went. Raises ValueError if `data` is
        larger than any peer accepts."""
        ...

    def mesh(self, topic: str) -> list[str]:
        """Peers in this node's mesh of a topic."""
        ...

    def subscribers(self, topic: str) -> list[str]:
        """Connected peers that are subscribed to a topic."""
        ...

    def serve(self, protocol: str, handler: Serve) -> None:
        """Answer streams of a protocol."""
        ...

    def open(self, peer: str, protocol: str) -> AbstractAsyncContextManager[Stream]:
        """A stream to a connected peer, closed with the block. Raises TransportError."""
        ...

    def protocols(self, peer: str) -> Sequence[str]:
        """Protocols that a connected peer has said it speaks; empty while that is not known."""
        ...
