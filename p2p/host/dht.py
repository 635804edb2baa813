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
from typing import Any, NoReturn

import trio
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import PeerStore, PeerStoreError
from libp2p.records.validator import NamespacedValidator

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

LOOKUP_SECONDS = 40.0
LOOKUP_DIALS = 8
_DIAL_SECONDS = 5.0

STREAM_SECONDS = 20.0
STREAM_BYTES = 256 * 1024
"""Read from one stream at most, either way. An honest answer holds 40 peers with their signed records: 40 KB."""

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

    def add_provider(self, key: bytes, provider: Any) -> None:
        """Nothing is kept."""

    def get_providers(self, key: bytes) -> list[Any]:
        """Nothing is known."""
        return []


class _Bounded:
    """A libp2p stream that ends when too much has come, and breaks when too many answers have gone."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._bytes = STREAM_BYTES
        self._writes = STREAM_WRITES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def read(self, n: int | None = None) -> bytes:
        """As of the stream."""
        most = min(n if n is not None and n >= 0 else 1024, self._bytes)
        data: bytes = await self._stream.read(most) if most else b""
        self._bytes -= len(data)
        return data

    async def write(self, data: bytes) -> None:
        """As of the stream. Raises TransportError in the end."""
        if not self._writes:
            raise TransportError("enough was answered on this stream")
        self._writes -= 1
        await self._stream.write(data)


class _View:
    """What the DHT sees of the host: its own, bounded peer store, and streams that are opened with care."""

    def __init__(self, host: Host, most: int) -> None:
        self._host = host
        self._most = most
        self._store = PeerStore()
        self.dials = 0

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
        return _Bounded(await self._host._open_stream(str(peer), tuple(map(str, protocols))))

    async def _dial(self, peer: Any) -> None:
        for address in self._store.addrs(peer)[:2]:
            place = str(address).partition("/p2p/")[0]
            with trio.move_on_after(_DIAL_SECONDS):
                try:
                    await self._host.connect(f"{place}/p2p/{peer}")
                except TransportError as error:
                    logger.debug("%s: %s", peer, error)
                else:
                    return
        raise TransportError("not reachable")


class Dht:
    """One node of the DHT, for one swarm, of whose shards it hears `heard`."""

    def __init__(self, host: Host, swarm: str, max_peers: int, shards: int = 1, heard: Sequence[int] = (0,)) -> None:
        self._host = host
        self._keys = [key_of(swarm)] if shards == 1 else [key_of(swarm, shard) for shard in heard]
        kept = self._keys if shards == 1 else [key_of(swarm, shard) for shard in range(shards)]
        most = ENOUGH if shards == 1 else ENOUGH + FOR_SHARD * len(heard)
        self._view = _View(host, min(most, max_peers))
        # Strict and empty: there is no value that this node would store. The service is never run: its own look-ups
        # and re-publishing would come on top of those below.
        validator = NamespacedValidator({}, strict_validation=True)
        self._kad = KadDHT(
            self._view, DHTMode.SERVER, validator=validator, validator_changed=True, strict_validation=True
        )
        self._kad.provider_store = _Providers(self._view, self._kad.peer_routing, kept)
        self._asking = _Asking(self._view, self._kad.peer_routing)
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
        found: list[Any] = []
        self._view.dials = LOOKUP_DIALS
        try:
            with trio.move_on_after(LOOKUP_SECONDS):
                found = await self._asking.find_providers(key, MAX_PROVIDERS)
                await self._kad.provider_store.provide(key)
        except Exception as error:  # noqa: BLE001  answers of strangers can raise anything in there
            logger.debug("a look-up failed: %r", error)
        return found

    def _addresses(self, found: list[Any]) -> Iterator[str]:
        for info in found:
            if info.peer_id == self._view.get_id():
                continue
            for address in info.addrs[:MAX_ADDRESSES]:
                text = str(address)
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
