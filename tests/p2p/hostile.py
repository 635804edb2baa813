"""A hostile peer: py-libp2p without any of this project's guards, free to write what it likes.

async with hostile_peer() as evil:
    await evil.connect(victim.addresses()[0])
    await evil.raw_meshsub(b"garbage")
    await evil.publish_raw("topic", b"data", tampered=True)
"""

import itertools
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.pubsub.pb import rpc_pb2
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.utils import encode_varint_prefixed
from multiaddr import Multiaddr

MESHSUB = "/meshsub/1.1.0"
_PREFIX = b"libp2p-pubsub:"


def peer_bytes(key: Ed25519PrivateKey) -> bytes:
    """The peer id of a key, as bytes."""
    return b"\x00\x24\x08\x01\x12\x20" + key.public_key().public_bytes_raw()


class HostilePeer:
    """One connection's worth of bad manners. `received` holds the RPCs that the victim sent."""

    def __init__(self, host: Any, key: Ed25519PrivateKey) -> None:
        self.host = host
        self.key = key
        self.received: list[Any] = []
        self.reading = True
        self.victim: Any = None
        self._stream: Any = None
        self._counter = itertools.count(time.time_ns())
        for protocol in (MESHSUB, "/meshsub/1.2.0"):
            host.set_stream_handler(protocol, self._listen)

    @property
    def peer_id(self) -> str:
        """Its peer id."""
        return str(self.host.get_id())

    async def _listen(self, stream: Any) -> None:
        """Collect what the victim gossips, unless deaf."""
        if not self.reading:
            await trio.sleep_forever()
        buffer = bytearray()
        while True:
            try:
                buffer += await stream.read(65536)
            except Exception:  # noqa: BLE001  the victim hung up
                return
            while (parsed := _split(buffer)) is not None:
                self.received.append(parsed)

    async def connect(self, address: str) -> None:
        """Dial the victim."""
        info = info_from_p2p_addr(Multiaddr(address))
        with trio.fail_after(10):
            await self.host.connect(info)
        self.victim = info.peer_id

    @property
    def muxed(self) -> Any:
        """The yamux connection with the victim."""
        return self.host.get_network().get_connections(self.victim)[0].muxed_conn

    @property
    def is_connected(self) -> bool:
        """Whether the victim has not hung up."""
        return any(not conn.muxed_conn.is_closed for conn in self.host.get_network().get_connections(self.victim))

    async def raw_meshsub(self, data: bytes) -> None:
        """Write raw bytes on the gossip stream, opening it if need be."""
        with trio.fail_after(10):
            if self._stream is None:
                self._stream = await self.host.new_stream(self.victim, [MESHSUB])
            try:
                await self._stream.write(data)
            except Exception:  # the victim has reset it; the next call opens another
                self._stream = None
                raise

    async def rpc(self, rpc: Any) -> None:
        """Send one RPC."""
        await self.raw_meshsub(encode_varint_prefixed(rpc.SerializeToString()))

    async def control(self, **parts: Any) -> None:
        """Send a control message, such as graft=[...]."""
        await self.rpc(rpc_pb2.RPC(control=rpc_pb2.ControlMessage(**parts)))

    async def join(self, topic: str) -> None:
        """Subscribe to a topic and enter the victim's mesh."""
        await self.rpc(rpc_pb2.RPC(subscriptions=[rpc_pb2.RPC.SubOpts(subscribe=True, topicid=topic)]))

    def message(
        self,
        topic: str,
        data: bytes,
        *,
        origin: bytes | None = None,
        key: Ed25519PrivateKey | None = None,
        signed: bool = True,
        tampered: bool = False,
        seqno: bytes | None = None,
    ) -> Any:
        """A gossip message, faulty as asked: another origin than the signing key's, unsigned, changed after signing."""
        key = key or self.key
        seqno = next(self._counter).to_bytes(8, "big") if seqno is None else seqno
        from_id = peer_bytes(key) if origin is None else origin
        message = rpc_pb2.Message(from_id=from_id, data=data, seqno=seqno, topicIDs=[topic])
        if signed:
            message.signature = key.sign(_PREFIX + message.SerializeToString())
        if tampered:
            message.data = data + b"!"
        return message

    async def publish_raw(self, topic: str, data: bytes, **faults: Any) -> Any:
        """Send one message, see `message`. Returns it, to be replayed with `rpc`."""
        message = self.message(topic, data, **faults)
        await self.rpc(rpc_pb2.RPC(publish=[message]))
        return message

    async def flood(self, topic: str, count: int, size: int = 64) -> None:
        """Many sound messages in few frames."""
        for start in range(0, count, 100):
            batch = [self.message(topic, bytes(size)) for _ in range(start, min(count, start + 100))]
            await self.rpc(rpc_pb2.RPC(publish=batch))

    async def raw_yamux(self, frame: bytes) -> None:
        """Write a yamux frame past all flow control."""
        with trio.fail_after(10):
            await self.muxed._write_frame(frame)

    def stop_reading(self) -> None:
        """Read nothing more from the socket, and so answer nothing more."""

        async def never(_count: int | None = None) -> bytes:
            await trio.sleep_forever()
            raise AssertionError

        self.muxed.secured_conn.read = never


def _split(buffer: bytearray) -> Any:
    length = shift = 0
    for position, byte in enumerate(buffer):
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            start = position + 1
            if len(buffer) < start + length:
                return None
            rpc = rpc_pb2.RPC()
            rpc.ParseFromString(bytes(buffer[start : start + length]))
            del buffer[: start + length]
            return rpc
    return None


@asynccontextmanager
async def hostile_peer(key: Ed25519PrivateKey | None = None, deaf: bool = False) -> AsyncIterator[HostilePeer]:
    """A peer that listens nowhere. Deaf: it takes the victim's gossip stream and never reads it."""
    key = key or Ed25519PrivateKey.generate()
    keys = create_new_key_pair(key.private_bytes_raw())
    noise = Noise(keys, noise_privkey=create_noise_key_pair().private_key)
    logging.getLogger("libp2p.network.auto_connector").setLevel(logging.WARNING)
    host = new_host(key_pair=keys, sec_opt={NOISE: noise}, muxer_opt={YAMUX: Yamux})
    async with host.run(listen_addrs=[]):
        evil = HostilePeer(host, key)
        evil.reading = not deaf
        yield evil
