"""Hosts for tests, on loopback."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.host import HostSettings, open_host
from p2p.host.host import Host
from p2p.transport import Verdict

TOPIC = "/swarmnode/2/test/rollouts/0"


class Watcher:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.connections: list[str] = []
        self.disconnections: list[str] = []
        self.offences: list[tuple[str, str]] = []

    def connected(self, peer: str) -> None:
        self.connections.append(peer)

    def disconnected(self, peer: str) -> None:
        self.disconnections.append(peer)

    def misbehaved(self, peer: str, what: str) -> None:
        self.offences.append((peer, what))


class Node:
    """A host with its watcher, and what was delivered to it."""

    def __init__(self, host: Host, watcher: Watcher) -> None:
        self.host = host
        self.watcher = watcher
        self.delivered: list[bytes] = []
        self.verdict = Verdict.ACCEPT

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.host.addresses()[0]

    async def subscribe(self, topic: str = TOPIC) -> None:
        """Collect a topic's messages."""
        await self.host.subscribe(topic, lambda _peer, _data: self.verdict, lambda _peer, data: self.take(data))

    def take(self, data: bytes) -> None:
        """Keep a message."""
        self.delivered.append(data)


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Node]:
    """One host."""
    watcher = Watcher()
    settings.setdefault("key", Ed25519PrivateKey.generate())
    async with open_host(HostSettings(**settings), watcher) as host:
        yield Node(host, watcher)


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait for something to become true. Raises trio.TooSlowError."""
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.01)


async def meshed(*nodes: Node, topic: str = TOPIC) -> None:
    """Join every node to the topic, connect each with the one before it, and wait for the mesh between them."""
    for node in nodes:
        await node.subscribe(topic)
    for first, second in pairwise(nodes):
        await second.host.connect(first.address)
        await until(partial(_in_mesh, first, second, topic))


def _in_mesh(a: Node, b: Node, topic: str) -> bool:
    return b.host.peer_id in a.host.mesh(topic) and a.host.peer_id in b.host.mesh(topic)
