"""Finding nodes of the same swarm through the nodes that are already known, by libp2p's Kademlia DHT.

A node says that it provides the key of its swarm, or those of the shards that it hears where there are several, and
asks who else does: so no key is that of more nodes as a swarm grows. The tables and the look-ups are py-libp2p's. What
it would let anybody do to a node is closed here: values are not stored at all, and providers of this swarm's keys
alone; a stream is bounded in time, bytes and answers; a look-up makes few new connections, through the host's own dial.
"""

import hashlib
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import trio
from google.protobuf.message import DecodeError
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.kad_dht.peer_routing import PeerRouting
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.kad_dht.utils import sort_peer_ids_by_distance
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStore, PeerStoreError
from libp2p.records.validator import NamespacedValidator
from libp2p.utils import encode_varint_prefixed

from p2p.addresses import leads_here
from p2p.gossip import topic_of
from p2p.host.host import Host
from p2p.host.network import parse_peer
from p2p.host.streams import finish
from p2p.transport import TransportError
from p2p.wire import VERSION

logger = logging.getLogger(__name__)

FIRST_SECONDS, MOST_SECONDS = 5.0, 600.0
"""Pauses between look-ups: doubled from the first to the most, and begun anew by a node that was alone."""

ENOUGH, FOR_SHARD = 16, 8
"""With so many connections a look-up makes no new ones; those for each shard of several come on top."""

LOOKUP_SECONDS, WALK_SECONDS = 40.0, 20.0
"""For finding providers or for telling of this node, and for the walk towards the key that comes first in each."""

LOOKUP_DIALS = 8
_DIAL_SECONDS = 5.0

STREAM_SECONDS = 20.0
STREAM_BYTES = 256 * 1024
"""Read from one stream at most, either way. An honest answer holds 40 peers with their signed records: 40 KB."""

MESSAGE_BYTES = 64 * 1024
MAX_TOLD, MAX_RECORD = 32, 1024
"""Peers of each kind in one message, and bytes of a signed record, that are looked at. An honest message has 21 peers.
What libp2p does with them takes time that grows with the square of their number, and the event loop waits."""

STREAM_WRITES = 64
PEER_STREAMS = 2
"""Streams of one peer that are answered at the same time."""

MAX_PROVIDERS, MAX_RECORDS = 256, 4096
"""Providers that are remembered of one key, and of all."""

MAX_ADDRESSES = 8
PROVIDER_SECONDS = 3600.0
_TOLD = 20

Found = Callable[[str], None]
"""Told of a multiaddr with a peer id."""


def key_of(swarm: str, shard: int | None = None) -> bytes:
    """What a swarm's nodes provide, or those that hear one of its shards: a sha2-256 multihash."""
    name = f"/swarmnode/{VERSION}/{swarm}" if shard is None else topic_of(swarm, shard)
    return b"\x12\x20" + hashlib.sha256(name.encode()).digest()


class _Providers(ProviderStore):  # type: ignore[misc]
    """Who provides some keys, in memory: a bounded number, the longest silent of the most wanted key dropped first."""

    def __init__(self, host: Any, peer_routing: Any, keys: Collection[bytes]) -> None:
        super().__init__(host=host, peer_routing=peer_routing)
        self._keys = frozenset(keys)
        self._known: dict[bytes, dict[str, tuple[float, Any]]] = {}

    def add_provider(self, key: bytes, provider: Any) -> None:
        """Note one who says so. Others' keys are of no interest."""
        if key not in self._keys:
            return
        name, known = str(provider.peer_id), self._known.setdefault(key, {})
        known.pop(name, None)
        known[name] = (trio.current_time(), PeerInfo(provider.peer_id, list(provider.addrs)[:MAX_ADDRESSES]))
        if len(known) > MAX_PROVIDERS:
            del known[next(iter(known))]
        if sum(map(len, self._known.values())) > MAX_RECORDS:
            most = max(self._known.values(), key=len)
            del most[next(iter(most))]

    def get_providers(self, key: bytes) -> list[Any]:
        """Some of them, drawn anew each time."""
        since = trio.current_time() - PROVIDER_SECONDS
        fresh = [info for when, info in self._known.get(key, {}).values() if when >= since]
        return random.sample(fresh, min(len(fresh), _TOLD))


class _Asking(ProviderStore):  # type: ignore[misc]
    """The asking half: knows nothing itself, so that every look-up asks the others."""

    def __init__(self, host: Any, peer_routing: Any) -> None:
        super().__init__(host=host, peer_routing=peer_routing)
        self.told: list[Any] = []

    def add_provider(self, key: bytes, provider: Any) -> None:
        """Kept until the look-up is over: one that is cut short has still been told of some."""
        self.told.append(provider)

    def get_providers(self, key: bytes) -> list[Any]:
        """Nothing is known."""
        return []


class _Addresses(PeerStore):  # type: ignore[misc]
    """A peer store with few addresses of each peer: libp2p bounds the peers alone."""

    def add_addrs(self, peer_id: Any, addrs: Sequence[Any], ttl: int = 0) -> None:
        """Take some of the addresses; the oldest give way."""
        super().add_addrs(peer_id, addrs[:MAX_ADDRESSES], ttl)
        if (known := self.peer_data_map.get(peer_id)) is not None:
            del known.addrs[:-MAX_ADDRESSES]


class _Bounded:
    """A libp2p stream of DHT messages: each is cut to what an honest one holds before libp2p sees it. It ends when too
    much has come, and breaks when too many answers have gone."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._bytes = STREAM_BYTES
        self._writes = STREAM_WRITES
        self._unread = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def read(self, n: int | None = None) -> bytes:
        """As of the stream. Raises TransportError for what is no message."""
        if not self._unread:
            self._unread = await self._message()
        most = len(self._unread) if n is None or n < 0 else n
        data, self._unread = self._unread[:most], self._unread[most:]
        return data

    async def _message(self) -> bytes:
        """The next message with its length before it; nothing at the end of the stream."""
        length = 0
        for shift in (0, 7, 14):
            byte = await self._some(1)
            if not byte and shift == 0:
                return b""
            length |= (byte[0] & 0x7F) << shift if byte else 0
            if not byte or byte[0] < 0x80:
                break
        else:
            raise TransportError("a DHT message of no sane length")
        if length > MESSAGE_BYTES:
            raise TransportError(f"a DHT message of {length} bytes")
        body = bytearray()
        while len(body) < length:
            piece = await self._some(length - len(body))
            if not piece:
                raise TransportError("the stream ended within a DHT message")
            body += piece
        message = Message()
        try:
            message.ParseFromString(bytes(body))
        except DecodeError as error:
            raise TransportError("a DHT message that cannot be read") from error
        _trim(message)
        return bytes(encode_varint_prefixed(message.SerializeToString()))

    async def _some(self, most: int) -> bytes:
        data: bytes = await self._stream.read(min(most, self._bytes)) if self._bytes else b""
        self._bytes -= len(data)
        return data

    async def write(self, data: bytes) -> None:
        """As of the stream. Raises TransportError in the end."""
        if not self._writes:
            raise TransportError("enough was answered on this stream")
        self._writes -= 1
        await self._stream.write(data)


def _trim(message: Any) -> None:
    for peers in (message.closerPeers, message.providerPeers):
        del peers[MAX_TOLD:]
        for peer in peers:
            del peer.addrs[MAX_ADDRESSES:]
            if len(peer.signedRecord) > MAX_RECORD:
                peer.ClearField("signedRecord")
    if len(message.senderRecord) > MAX_RECORD:
        message.ClearField("senderRecord")


class _View:
    """What the DHT sees of the host: its own, bounded peer store, and streams that are opened with care."""

    def __init__(self, host: Host, most: int) -> None:
        self._host = host
        self._most = most
        self._store = _Addresses()
        self.dials = 0
        self.reached: dict[Any, None] = {}
        """Peers to which streams were opened."""

    def get_id(self) -> Any:
        """This node."""
        return self._host.libp2p.get_id()

    def get_private_key(self) -> Any:
        """Signs the record of this node's addresses."""
        return self._host.libp2p.get_private_key()

    def get_addrs(self) -> list[Any]:
        """This node's addresses."""
        return list(self._host.libp2p.get_addrs())

    def get_peerstore(self) -> Any:
        """Addresses that the DHT has heard of; not the host's, which holds what peers say of themselves."""
        return self._store

    def get_connected_peers(self) -> list[Any]:
        """Those to ask first, whatever they were heard to speak: that may be old, and costs little to find out."""
        return [parse_peer(connection.peer) for connection in self._host.connections()]

    def set_stream_handler(self, protocol: str, handler: Any) -> None:
        """Not from within: see `Dht.answer`."""

    def learn(self, peer: Any) -> None:
        """Take over what a connected peer has said of itself."""
        try:
            self._store.add_addrs(peer, self._host.libp2p.get_peerstore().addrs(peer)[:MAX_ADDRESSES], 7200)
        except PeerStoreError:
            logger.debug("no addresses of %s yet", peer)

    async def new_stream(self, peer: Any, protocols: Sequence[str]) -> Any:
        """A stream to a peer, which is dialled only while there are few connections. Raises TransportError."""
        connections = self._host.connections()
        if str(peer) not in {connection.peer for connection in connections}:
            if len(connections) >= self._most or self.dials <= 0:
                raise TransportError("not connected")
            self.dials -= 1
            await self._dial(peer)
        stream = await self._host._open_stream(str(peer), tuple(map(str, protocols)))
        self.reached[peer] = None
        return _Bounded(stream)

    def is_fit(self, address: str) -> bool:
        """Whether a stranger may have this node dial an address: its own machine only if nodes are there."""
        return not leads_here(address) or any(leads_here(one.address) for one in self._host.connections())

    async def _dial(self, peer: Any) -> None:
        for address in self._store.addrs(peer)[:2]:
            place = str(address).partition("/p2p/")[0]
            if not self.is_fit(place):
                continue
            with trio.move_on_after(_DIAL_SECONDS):
                try:
                    await self._host.connect(f"{place}/p2p/{peer}")
                except TransportError as error:
                    logger.debug("%s: %s", peer, error)
                else:
                    return
        raise TransportError("not reachable")


class _Routing(PeerRouting):  # type: ignore[misc]
    """The walk towards a key. Ids near a key are easily made up, so those that were reached on the way come first."""

    async def find_closest_peers_network(self, target_key: bytes, count: int = 20) -> list[Any]:
        """At most `count` peers that were reached, the closest first, and as many that need not be there."""
        self.host.reached.clear()
        closest: list[Any] = []
        with trio.move_on_after(WALK_SECONDS):
            closest = await super().find_closest_peers_network(target_key, count)
        reached = sort_peer_ids_by_distance(target_key, list(self.host.reached))
        return list(dict.fromkeys([*reached[:count], *closest]))


class Dht:
    """One node of the DHT, for one swarm, of whose shards it hears `heard`."""

    def __init__(self, host: Host, swarm: str, max_peers: int, shards: int = 1, heard: Sequence[int] = (0,)) -> None:
        self._host = host
        self._keys = [key_of(swarm)] if shards == 1 else [key_of(swarm, shard) for shard in heard]
        kept = self._keys if shards == 1 else [key_of(swarm, shard) for shard in range(shards)]
        most = ENOUGH if shards == 1 else ENOUGH + FOR_SHARD * len(heard)
        # Whom a walk meets is of any shard, and stays: half of the places are for those that are looked for.
        self._view = _View(host, min(most, (max_peers + 1) // 2))
        # Strict and empty: there is no value that this node would store. The service is never run: its own look-ups
        # and re-publishing would come on top of those below.
        validator = NamespacedValidator({}, strict_validation=True)
        self._kad = KadDHT(
            self._view, DHTMode.SERVER, validator=validator, validator_changed=True, strict_validation=True
        )
        routing = _Routing(self._view, self._kad.routing_table)
        self._kad.provider_store = _Providers(self._view, routing, kept)
        self._asking = _Asking(self._view, routing)
        self._open: Counter[str] = Counter()
        host.libp2p.set_stream_handler(PROTOCOL_ID, self.answer)

    async def answer(self, stream: Any) -> None:
        """Answer one stream of a peer."""
        peer = stream.muxed_conn.peer_id
        if self._open[str(peer)] >= PEER_STREAMS:
            await finish(stream, clean=False)
            return
        self._open[str(peer)] += 1
        try:
            with trio.move_on_after(STREAM_SECONDS):
                self._view.learn(peer)
                await self._kad.handle_stream(_Bounded(stream))
        except Exception as error:  # noqa: BLE001  what strangers send can raise anything in there
            logger.debug("the DHT's answer to %s failed: %r", peer, error)
        finally:
            self._open[str(peer)] -= 1
            if not self._open[str(peer)]:
                del self._open[str(peer)]
            await finish(stream, clean=False)

    async def look(self) -> list[str]:
        """Provide the keys, and ask who else does. Returns multiaddrs; fewer, or none, if a look-up fails."""
        for peer in self._view.get_connected_peers():
            self._view.learn(peer)
            await self._kad.add_peer(peer)
        found: dict[str, None] = {}
        for key in self._keys:
            providers = await self._look(key)
            found |= dict.fromkeys(itertools.islice(self._addresses(providers), MAX_PROVIDERS * 2))
        return list(found)

    async def _look(self, key: bytes) -> list[Any]:
        self._asking.told = []
        # Each with its own time: peers that are slow at one must not keep this node from the other.
        for ask in (
            partial(self._asking.find_providers, key, MAX_PROVIDERS),
            partial(self._kad.provider_store.provide, key),
        ):
            self._view.dials = LOOKUP_DIALS // 2
            try:
                with trio.move_on_after(LOOKUP_SECONDS):
                    await ask()
            except Exception as error:  # noqa: BLE001  answers of strangers can raise anything in there
                logger.debug("a look-up failed: %r", error)
        found, self._asking.told = self._asking.told, []
        # Only so many addresses are passed on: who answers first, or tells of most, must not be all of them.
        random.shuffle(found)
        return found

    def _addresses(self, found: list[Any]) -> Iterator[str]:
        for info in found:
            if info.peer_id == self._view.get_id():
                continue
            for address in info.addrs[:MAX_ADDRESSES]:
                text = str(address)
                if not self._view.is_fit(text):
                    continue
                if not text.endswith(f"/p2p/{info.peer_id}"):
                    text = f"{text}/p2p/{info.peer_id}"
                yield text


async def run_dht(dht: Dht, host: Host, found: Found) -> NoReturn:
    """Take part in the DHT and tell of nodes of the swarm, until cancelled."""
    pause = FIRST_SECONDS
    while True:
        if not host.connections():
            pause = FIRST_SECONDS
            await trio.sleep(1.0)
            continue
        await trio.sleep(pause * random.uniform(0.75, 1.25))
        for address in await dht.look():
            found(address)
        pause = min(2 * pause, MOST_SECONDS)
