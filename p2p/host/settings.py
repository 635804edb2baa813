"""What a host is opened with, and the limits that it holds every peer to. Imports nothing of libp2p."""

from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_MESSAGE = 320 * 1024
"""Bytes of data in one gossip message: an envelope of 256 KiB and room for what may be wrapped around it later."""

MAX_RPC = 1024 * 1024
"""Bytes of one gossip frame; what go-libp2p and js-libp2p take at most by default."""

STREAM_SECONDS = 15.0
"""Longest wait for one read, write or negotiation on a stream."""

DIAL_SECONDS = 10.0
"""Longest wait for a connection with its handshakes."""

PEER_STREAMS = 8
"""Streams of one protocol that one peer may have answered at the same time."""


class ListenError(Exception):
    """The node cannot listen on one of its addresses. The message names it and says why."""


class PortTakenError(ListenError):
    """Another program listens on the port."""


@dataclass(frozen=True, slots=True)
class HostSettings:
    """One host. `listen` and `announce` are multiaddrs without a peer id."""

    key: Ed25519PrivateKey
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce: tuple[str, ...] = ()
    """Addresses to give out besides those that are listened on."""
    max_peers: int = 64
    allow: frozenset[str] = frozenset()
    """Peer ids; if not empty, nobody else may connect, nor be the origin of a gossip message."""
    blocked: frozenset[str] = frozenset()
    app_score: Callable[[str], float] | None = None
    """What the application thinks of a peer, added to its gossip score; below zero it leaves the mesh."""
    ping_seconds: float = 5.0
    """How often a connection is tested; one that has been silent for three times as long is closed."""
