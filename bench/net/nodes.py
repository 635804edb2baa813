"""One node of each kind that is compared: raw TCP, raw py-libp2p, and this project's layers, one on top of the other.

Each is an async context manager that gives a `Node` and tells a `Seen` what happens.
"""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, cast

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pubsub import Pubsub
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from bench.net.batches import SWARM, load_verifiers
from p2p.admission import Admission
from p2p.gossip import Gossip, topic_of
from p2p.host import HostSettings, open_host
from p2p.host.host import Host
from p2p.host.logs import quiet
from p2p.reputation import Reputation
from p2p.settings import AdmissionSettings, NetworkSettings
from p2p.store import EnvelopeStore
from p2p.swarm import open_swarm
from p2p.transport import Deliver, Observer, Transport, Validate, Verdict
from p2p.wire import Envelope
from rl.pool import SqlitePool
from rl.rollouts import ScoredGroup
from verifiers.sandbox import open_sandbox
from verifiers.settings import VerifierSettings

TOPIC = topic_of(SWARM, 0)
VERIFIERS = VerifierSettings(answer_seconds=30)
"""The product's defaults, with the patience of a machine that runs sixteen nodes."""
FASTEST = (10_000.0, 10_000.0)
"""Envelopes a second and at once: no pace."""
UNLIMITED = AdmissionSettings(batches_per_second=1e4, burst=10**5, queue=10**4, seconds_per_second=64)
"""A receiver that caps no origin: in the product these caps are what limits a node first."""


class Seen(Protocol):
    """Told what happens, at the moment at which it does."""

    def sent(self, data: bytes) -> None:
        """An own batch is handed to the network."""
        ...

    def arrived(self, data: bytes) -> None:
        """A batch of another node is here, for the first time, and has passed what its kind of node checks at once."""
        ...

    def stored(self, origin: str, number: int) -> None:
        """All groups of this batch were made anew and scored, and are in the pool."""
        ...


_LOOPBACK = "/ip4/127.0.0.1/tcp/0"
_LENGTH = 4
_CHUNK = 256 * 1024
_MESH_LOOK = 0.02


@dataclass(frozen=True, slots=True)
class Batch:
    """What a node publishes: sealed, and as the groups to be sealed. `number` counts a node's batches from 1."""

    envelope: Envelope
    groups: Sequence[ScoredGroup]
    number: int


class Node(Protocol):
    """A running node."""

    @property
    def address(self) -> str:
        """Where others reach it."""
        ...

    async def join(self, addresses: Sequence[str]) -> None:
        """Connect with these."""
        ...

    async def meshed(self, peers: int) -> None:
        """Returns when it has so many peers to exchange messages with at once."""
        ...

    async def publish(self, batch: Batch) -> None:
        """Send one batch to all."""
        ...


Open = Callable[[Ed25519PrivateKey, Seen], AbstractAsyncContextManager[Node]]


class _Tcp:
    """Frames over plain sockets, from each node to each other one directly."""

    def __init__(self, address: str, nursery: trio.Nursery, seen: Seen) -> None:
        self.address = address
        self._nursery = nursery
        self._seen = seen
        self._streams: list[trio.SocketStream] = []

    async def join(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            stream = await trio.open_tcp_stream("127.0.0.1", int(address))
            self._nursery.start_soon(self.serve, stream)

    async def meshed(self, peers: int) -> None:
        while len(self._streams) < peers:
            await trio.sleep(_MESH_LOOK)

    async def publish(self, batch: Batch) -> None:
        data = batch.envelope.data
        self._seen.sent(data)
        frame = len(data).to_bytes(_LENGTH, "big") + data
        for stream in self._streams:
            await stream.send_all(frame)

    async def serve(self, stream: trio.SocketStream) -> None:
        self._streams.append(stream)
        buffer = bytearray()
        while piece := await stream.receive_some(_CHUNK):
            buffer += piece
            while len(buffer) >= _LENGTH:
                end = _LENGTH + int.from_bytes(buffer[:_LENGTH], "big")
                if len(buffer) < end:
                    break
                self._seen.arrived(bytes(buffer[_LENGTH:end]))
                del buffer[:end]


@asynccontextmanager
async def open_tcp(key: Ed25519PrivateKey, seen: Seen) -> AsyncIterator[Node]:
    """Raw TCP."""
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        node = _Tcp(str(listener.socket.getsockname()[1]), nursery, seen)
        nursery.start_soon(trio.serve_listeners, node.serve, [listener])
        yield node
        nursery.cancel_scope.cancel()


class _Libp2p:
    """py-libp2p's own pubsub and router."""

    def __init__(self, host: Any, pubsub: Any, router: Any, seen: Seen) -> None:
        self._seen = seen
        self._host = host
        self._pubsub = pubsub
        self._router = router
        self.address = f"{host.get_addrs()[0]}"

    async def join(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            await self._host.connect(info_from_p2p_addr(Multiaddr(address)))

    async def meshed(self, peers: int) -> None:
        while len(self._router.mesh.get(TOPIC, ())) < peers:
            await trio.sleep(_MESH_LOOK)

    async def publish(self, batch: Batch) -> None:
        self._seen.sent(batch.envelope.data)
        await self._pubsub.publish(TOPIC, batch.envelope.data)


@asynccontextmanager
async def open_libp2p(key: Ed25519PrivateKey, seen: Seen) -> AsyncIterator[Node]:
    """Raw py-libp2p, with the settings that make it work at all."""
    quiet()
    keys = create_new_key_pair(key.private_bytes_raw())
    listen = [Multiaddr(_LOOPBACK)]
    host = new_host(
        key_pair=keys,
        listen_addrs=listen,
        sec_opt={NOISE: Noise(keys, noise_privkey=create_noise_key_pair().private_key)},
        muxer_opt={YAMUX: Yamux},
    )
    router = GossipSub(
        protocols=["/meshsub/1.2.0", "/meshsub/1.1.0"],
        degree=6,
        degree_low=4,
        degree_high=8,
        heartbeat_interval=1,
        adaptive_gossip_enabled=False,
        spam_protection_enabled=False,
        eclipse_protection_enabled=False,
    )
    pubsub = Pubsub(host, router, strict_signing=True)

    async def read(subscription: Any) -> None:
        own = host.get_id().to_bytes()
        while True:
            message = await subscription.get()
            if message.from_id != own:
                seen.arrived(message.data)

    async with (
        host.run(listen_addrs=listen),
        background_trio_service(pubsub),
        background_trio_service(router),
        trio.open_nursery() as nursery,
    ):
        await pubsub.wait_until_ready()
        nursery.start_soon(read, await pubsub.subscribe(TOPIC))
        yield _Libp2p(host, pubsub, router, seen)
        nursery.cancel_scope.cancel()


class _Quiet:
    """An observer that takes any complaint for a fault of the measurement."""

    def connected(self, peer: str) -> None:
        """Nothing to do."""

    def disconnected(self, peer: str) -> None:
        """Nothing to do."""

    def misbehaved(self, peer: str, what: str) -> None:
        """Raises AssertionError."""
        raise AssertionError(f"{peer} misbehaved: {what}")


class _Ears:
    """A host that tells what goes out and which messages were accepted; all else is the host's."""

    def __init__(self, host: Host, seen: Seen) -> None:
        self._host = host
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    async def subscribe(self, topic: str, validate: Validate, deliver: Deliver) -> None:
        """See p2p.transport.Transport."""

        def heard(peer: str, data: bytes) -> Verdict:
            verdict = validate(peer, data)
            if verdict is Verdict.ACCEPT:
                self._seen.arrived(data)
            return verdict

        await self._host.subscribe(topic, heard, deliver)

    async def publish(self, topic: str, data: bytes) -> int:
        """See p2p.transport.Transport."""
        self._seen.sent(data)
        return await self._host.publish(topic, data)


class _Own:
    """A node of this project; `send` says how it publishes."""

    def __init__(self, transport: Transport, send: Callable[[Batch], Awaitable[Any]]) -> None:
        self._transport = transport
        self._send = send
        self.address = transport.addresses()[0]

    async def join(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            await self._transport.connect(address)

    async def meshed(self, peers: int) -> None:
        while len(self._transport.mesh(TOPIC)) < peers:
            await trio.sleep(_MESH_LOOK)

    async def publish(self, batch: Batch) -> None:
        await self._send(batch)


@asynccontextmanager
async def _open_ears(key: Ed25519PrivateKey, seen: Seen, observer: Observer) -> AsyncIterator[Transport]:
    async with open_host(HostSettings(key), observer) as host:
        yield cast(Transport, _Ears(host, seen))


@asynccontextmanager
async def open_plain(key: Ed25519PrivateKey, seen: Seen) -> AsyncIterator[Node]:
    """This project's gossip, below all that knows of batches: whatever comes is passed on."""
    async with _open_ears(key, seen, _Quiet()) as transport:
        await transport.subscribe(TOPIC, lambda peer, data: Verdict.ACCEPT, lambda peer, data: None)
        yield _Own(transport, lambda batch: transport.publish(TOPIC, batch.envelope.data))


@asynccontextmanager
async def open_checked(key: Ed25519PrivateKey, seen: Seen) -> AsyncIterator[Node]:
    """The same with the outbox, the check of admission before anything is passed on, and the store: a relay's work."""
    async with _open_ears(key, seen, _Quiet()) as transport, trio.open_nursery() as nursery:
        reputation = Reputation(None, _never)
        gate = Admission(
            UNLIMITED,
            SWARM,
            transport.peer_id,
            (),
            None,
            None,
            reputation,
            lambda: 0,
            on_accepted=EnvelopeStore().add,
        )
        gossip = Gossip(transport, SWARM, 1, 1, gate.check, FASTEST)
        await gossip.subscribe()
        nursery.start_soon(gossip.run)
        yield _Own(transport, lambda batch: gossip.publish(batch.envelope))
        nursery.cancel_scope.cancel()


class _Pool:
    """The product's pool, which tells when a batch is in it."""

    def __init__(self, pool: SqlitePool, seen: Seen) -> None:
        self._pool = pool
        self._seen = seen

    async def add(self, groups: Sequence[ScoredGroup]) -> None:
        """See p2p.admission.Pool."""
        self._pool.add(groups)
        self._seen.stored(groups[0].origin, groups[0].group.policy_step)


@asynccontextmanager
async def open_node(key: Ed25519PrivateKey, seen: Seen) -> AsyncIterator[Node]:
    """All that a node does with batches: it seals its own, and makes, scores and keeps those of others."""
    with TemporaryDirectory() as directory:
        path = Path(directory)
        async with AsyncExitStack() as stack:
            sandbox = await stack.enter_async_context(open_sandbox(VERIFIERS, [path]))
            await load_verifiers(sandbox)
            pool = stack.enter_context(SqlitePool(path / "pool.sqlite", "own"))
            swarm = await stack.enter_async_context(
                open_swarm(
                    lambda watcher: _open_ears(key, seen, watcher),
                    key,
                    NetworkSettings(swarm=SWARM),
                    UNLIMITED,
                    sandbox,
                    _Pool(pool, seen),
                    round=lambda: 0,
                    model="model",
                    say=_complain,
                    pace=FASTEST,
                )
            )
            yield _Own(swarm.transport, lambda batch: swarm.share(batch.groups, batch.number))


def _never(peer: str) -> None:
    raise AssertionError(f"{peer} was banned")


def _complain(level: str, text: str) -> None:
    if level != "info":
        print(f"{level}: {text}", file=sys.stderr)
