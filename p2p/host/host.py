"""The host: p2p.transport.Transport on libp2p. See `open_host`."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from ipaddress import ip_address
from typing import Any

import psutil
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.rcmgr import Direction
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from p2p.host import identify
from p2p.host.gossip import Gossip
from p2p.host.logs import quiet
from p2p.host.messages import Author
from p2p.host.muxer import Muxer
from p2p.host.network import Endpoint, Negotiator, Network, Upgrader, parse_peer
from p2p.host.probe import peer_at
from p2p.host.pubsub import PROTOCOLS, Pubsub
from p2p.host.scores import Scores
from p2p.host.settings import DIAL_SECONDS, STREAM_SECONDS, HostSettings, ListenError
from p2p.host.streams import FrameStream, answering, finish, opened
from p2p.host.tcp import Listener, Tcp, open_listener
from p2p.transport import Connection, Deliver, Observer, Serve, TransportError, Validate

logger = logging.getLogger(__name__)

_CHOSEN = 4  # the part of all places that is kept for peers that this node dials

Circuit = Callable[[str, str], Awaitable[None]]
"""Connects to a peer by a `/p2p-circuit` address; given both."""


class Host:
    """A running host. `libp2p` and `network` are for the other modules of this package."""

    circuit: Circuit | None = None

    def __init__(self, settings: HostSettings, observer: Observer, nursery: trio.Nursery) -> None:
        self._settings = settings
        self._observer = observer
        self._nursery = nursery
        self._blocked = set(settings.blocked)
        self._dialling: dict[str, trio.Lock] = {}
        self.announced: list[str] = list(settings.announce)
        keys = create_new_key_pair(settings.key.private_bytes_raw())
        peer_id = ID.from_pubkey(keys.public_key)
        self._peer_id = str(peer_id)
        peerstore = PeerStore()
        peerstore.add_key_pair(peer_id, keys)
        noise = Noise(keys, noise_privkey=create_noise_key_pair().private_key)
        upgrader = Upgrader({NOISE: noise}, {YAMUX: Muxer}, self._mux)
        self.network = Network(peer_id, peerstore, upgrader, Tcp(), self)
        self.libp2p = Endpoint(self.network, negotiate_timeout=int(STREAM_SECONDS), addrs_factory=self._advertised)
        author = Author(settings.key)
        self._gossip = Gossip(
            self._peer_id, lambda raw: str(ID(raw)), Scores(settings.app_score), self.misbehaved, self._refuses_origin
        )
        self._pubsub = Pubsub(self._gossip, author, self._open_stream, self.misbehaved, self._drop)
        self.libp2p.set_stream_handler(identify.PUSH_PROTOCOL, partial(identify.handle_push, peerstore))
        for protocol in PROTOCOLS:
            self.libp2p.set_stream_handler(protocol, self._pubsub.handle)

    def listen(self, listeners: dict[str, Listener]) -> None:
        """Take connections."""
        for address, listener in listeners.items():
            self.network.serve(address, listener)

    async def run(self) -> None:
        """Gossip's heartbeat."""
        await self._pubsub.run()

    def _mux(self, secured: Any, peer_id: Any) -> Muxer:
        return Muxer(secured, peer_id, self.misbehaved, self._settings.ping_seconds)

    # Who is connected

    @property
    def peer_id(self) -> str:
        """This node's own peer id."""
        return self._peer_id

    def refusal(self, peer: str, inbound: bool) -> str | None:
        """Why a peer may not connect, or None."""
        if peer == self._peer_id:
            return "it is this node itself"
        if peer in self._blocked:
            return f"{peer} is blocked"
        if self._settings.allow and peer not in self._settings.allow:
            return f"{peer} is not on the list of those allowed"
        connected, most = self.network.connections, self._settings.max_peers
        if inbound:  # strangers cannot take all places: some are for those that this node chooses
            most -= most // _CHOSEN
        if len(connected) >= most and parse_peer(peer) not in connected:
            return f"connected with {most} peers, the most allowed"
        return None

    def _refuses_origin(self, peer: str) -> bool:
        return peer in self._blocked or bool(self._settings.allow and peer not in self._settings.allow)

    def came(self, peer: str) -> None:
        """A peer has its first connection."""
        outbound = any(conn.direction == Direction.OUTBOUND for conn in self.network.live(parse_peer(peer)))
        self._nursery.start_soon(self._pubsub.run_link, self._pubsub.came(peer, outbound))
        self._tell(self._observer.connected, peer)

    def went(self, peer: str) -> None:
        """A peer has lost its last connection."""
        self._pubsub.went(peer)
        self.libp2p.forget(parse_peer(peer))
        self._tell(self._observer.disconnected, peer)

    def misbehaved(self, peer: str, what: str) -> None:
        """A peer broke a protocol."""
        self._tell(self._observer.misbehaved, peer, what)

    def _tell(self, listener: Callable[..., None], *arguments: str) -> None:
        try:
            listener(*arguments)
        except Exception:
            logger.exception("an observer of the network failed")

    def addresses(self) -> list[str]:
        """Multiaddrs under which this node listens, those announced first, each ending in `/p2p/<peer id>`."""
        listening = [str(one) for listener in self.network.listeners.values() for one in listener.get_addrs()]
        plain = dict.fromkeys([*self.announced, *(one for address in listening for one in _expanded(address))])
        return [address.removesuffix(f"/p2p/{self._peer_id}") + f"/p2p/{self._peer_id}" for address in plain]

    def _advertised(self, _candidates: list[Any]) -> list[Any]:
        return [Multiaddr(address) for address in self.addresses()]

    def connections(self) -> list[Connection]:
        """The connected peers, each once."""
        now, found = trio.current_time(), []
        for peer_id in list(self.network.connections):
            live = self.network.live(peer_id)
            if live:
                address = next(iter(map(str, live[0].get_transport_addresses())), "")
                outbound = live[0].direction == Direction.OUTBOUND
                since = min(conn.opened_at for conn in live)
                found.append(Connection(str(peer_id), address.removesuffix(f"/p2p/{peer_id}"), outbound, now - since))
        return found

    async def connect(self, address: str) -> str:
        """Dial a multiaddr ending in `/p2p/<peer id>`, unless connected. Returns the peer id. Raises TransportError.

        Without a peer id it finds out who answers there first; if it is this node itself, nothing more is done.
        """
        if "/p2p/" not in address:
            found = await peer_at(self.network, address)
            if found == self._peer_id:
                return found
            address = f"{address}/p2p/{found}"
        target, peer = _split(address)
        lock = self._dialling.setdefault(peer, trio.Lock())
        try:
            async with lock:
                if not self.network.live(parse_peer(peer)):
                    await self._dial(target, peer)
        finally:
            if not lock.locked():  # it is, if a waiting task has got it just now
                self._dialling.pop(peer, None)
        return peer

    async def _dial(self, target: Any, peer: str) -> None:
        why = self.refusal(peer, inbound=False)
        if why is not None:
            raise TransportError(f"cannot connect: {why}")
        try:
            with trio.fail_after(DIAL_SECONDS):
                if "/p2p-circuit" not in str(target):
                    await self.network._dial_addr_single_attempt(target, parse_peer(peer))
                elif self.circuit is None:
                    raise TransportError("no circuit relay is in use here")
                else:
                    await self.circuit(str(target), peer)
        except TransportError:
            raise
        except trio.TooSlowError:
            raise TransportError(f"{target} did not answer within {DIAL_SECONDS:.0f} s") from None
        except Exception as error:
            raise TransportError(f"cannot connect to {target}: {_root(error)}") from error

    async def disconnect(self, peer: str) -> None:
        """Close all connections with a peer."""
        await self.network.close_peer(parse_peer(peer))

    def _drop(self, peer: str) -> None:
        if not self.network._closing:
            self._nursery.start_soon(self._close_peer, peer)

    async def _close_peer(self, peer: str) -> None:
        try:
            await self.disconnect(peer)
        except Exception as error:  # noqa: BLE001  the connection is going anyhow, and a name may be no peer id
            logger.debug("disconnecting %s: %r", peer, error)

    def block(self, peer: str) -> None:
        """Close all connections with a peer, soon, and refuse new ones; its messages are dropped."""
        self._blocked.add(peer)
        self._drop(peer)

    def unblock(self, peer: str) -> None:
        """Undo `block`."""
        self._blocked.discard(peer)

    # Gossip

    async def subscribe(self, topic: str, validate: Validate, deliver: Deliver) -> None:
        """Join a gossip topic."""
        self._gossip.subscribe(topic, validate, deliver)
        await trio.lowlevel.checkpoint()

    async def publish(self, topic: str, data: bytes) -> int:
        """Send to a topic's mesh, waiting for room. Returns to how many peers it went. Raises ValueError."""
        return await self._pubsub.publish(topic, data)

    def mesh(self, topic: str) -> list[str]:
        """Peers in this node's mesh of a topic."""
        joined = self._gossip.topics.get(topic)
        return [] if joined is None else sorted(joined.mesh)

    def subscribers(self, topic: str) -> list[str]:
        """Connected peers that are subscribed to a topic."""
        return sorted(link.peer for link in self._gossip.links.values() if topic in link.topics)

    # Streams

    def serve(self, protocol: str, handler: Serve) -> None:
        """Answer streams of a protocol."""
        self.libp2p.set_stream_handler(protocol, answering(protocol, handler))

    def open(self, peer: str, protocol: str) -> AbstractAsyncContextManager[FrameStream]:
        """A stream to a connected peer, closed with the block. Raises TransportError."""
        return opened(peer, lambda: self._open_stream(peer, (protocol,)))

    def protocols(self, peer: str) -> Sequence[str]:
        """Protocols that a connected peer has said it speaks; empty while that is not known."""
        try:
            return sorted(map(str, self.libp2p.get_peerstore().get_protocols(parse_peer(peer))))
        except Exception:  # noqa: BLE001  of a peer it does not know, the store raises its own kind
            return []

    async def _open_stream(self, peer: str, protocols: tuple[str, ...]) -> Any:
        live = self.network.live(parse_peer(peer))
        if not live:
            raise TransportError(f"not connected with {peer[-8:]}")
        stream = await live[0].new_stream()
        agreed = None
        try:
            agreed = await MultiselectClient().select_one_of(protocols, Negotiator(stream), int(STREAM_SECONDS))
        finally:
            if agreed is None:
                await finish(stream, clean=False)
        stream.set_protocol(agreed)
        return stream


def _split(address: str) -> tuple[Any, str]:
    """A multiaddr without its last `/p2p/<peer id>`, and that id. Raises TransportError."""
    target, _, peer = address.rpartition("/p2p/")
    try:
        parse_peer(peer)
        return Multiaddr(target), peer
    except (MultiaddrError, ValueError) as error:
        raise TransportError(f"{address} is not a multiaddr like /ip4/192.0.2.1/tcp/4747/p2p/<peer id>") from error


def _root(error: BaseException) -> str:
    """What was wrong in the first place."""
    text = str(error)
    while (cause := error.__cause__) is not None:
        error = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause
        text = str(error) or text
    return text or type(error).__name__


def _expanded(address: str) -> list[str]:
    """A multiaddr that listens everywhere, as one for each address of this machine."""
    _, family, host, rest = address.split("/", 3)
    if not ip_address(host).is_unspecified:
        return [address]
    own = [entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries]
    kind = 4 if family == "ip4" else 6
    hosts = [host for host in own if _version(host) == kind and not ip_address(host).is_link_local]
    hosts.sort(key=lambda host: ip_address(host).is_loopback)
    return [f"/{family}/{host}/{rest}" for host in hosts]


def _version(host: str) -> int:
    try:
        return ip_address(host).version
    except ValueError:  # a hardware address
        return 0


def _check_announced(address: str) -> None:
    try:
        Multiaddr(address)
    except (MultiaddrError, ValueError) as error:
        raise ListenError(f"cannot announce {address}: not a multiaddr like /ip4/192.0.2.1/tcp/4747") from error


@asynccontextmanager
async def open_host(settings: HostSettings, observer: Observer) -> AsyncIterator[Host]:
    """A host that listens and gossips for the time of a block. Raises ListenError."""
    quiet()
    listeners: dict[str, Listener] = {}
    failure: Exception | None = None
    try:
        for address in settings.announce:
            _check_announced(address)
        for address in settings.listen:
            listeners[address] = await open_listener(address)
        async with trio.open_nursery() as nursery:
            host = Host(settings, observer, nursery)
            async with background_trio_service(host.network):
                await host.network.event_background_nursery_created.wait()
                host.listen(listeners)
                nursery.start_soon(host.run)
                try:
                    yield host
                except Exception as error:  # noqa: BLE001  passed on below, past the nurseries that would wrap it
                    failure = error
                finally:
                    with trio.CancelScope(shield=True):
                        await host.network.shut()
            nursery.cancel_scope.cancel()
    finally:
        for listener in listeners.values():
            listener.abandon()
    if failure is not None:
        raise failure
