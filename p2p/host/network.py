"""The connections of a host: libp2p's swarm and host with every task owned, every handler caught, every peer gated.

What py-libp2p does on its own and this does not: dial peers out of the peer store, hold an inbound slot until the whole
node ends, share listening ports, and let one stream handler's exception end the service.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import trio
from libp2p.abc import ConnectionType
from libp2p.host.basic_host import BasicHost
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.rcmgr import Direction
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from p2p.host import identify
from p2p.host.muxer import Muxer
from p2p.host.settings import DIAL_SECONDS, STREAM_SECONDS
from p2p.host.streams import finish
from p2p.host.tcp import Listener, Socket

logger = logging.getLogger(__name__)

_MAX_HANDSHAKES = 32
_PER_PEER = 3  # both sides may dial at once, and a dead connection may not have been noticed yet
_IDENTIFY_PAUSES = 1.0, 5.0  # seconds between tries to learn who a peer is
_MAX_NAME = 1024  # bytes of a protocol's name in a negotiation


class Keeper(Protocol):
    """Decides who may connect, and is told who is."""

    def refusal(self, peer: str, inbound: bool) -> str | None:
        """Why a peer may not connect, or None."""
        ...

    def came(self, peer: str) -> None:
        """A peer has its first connection."""
        ...

    def went(self, peer: str) -> None:
        """A peer has lost its last connection."""
        ...

    def misbehaved(self, peer: str, what: str) -> None:
        """A peer broke a protocol."""
        ...


class Negotiator(MultiselectCommunicator):  # type: ignore[misc]
    """Protocol negotiation with a bound on the length of a name, and no exception but the one that is expected."""

    async def read(self) -> str:
        """One line. Raises MultiselectCommunicatorError."""
        try:
            length = 0
            for shift in range(0, 21, 7):
                (byte,) = await self._exactly(1)
                length |= (byte & 0x7F) << shift
                if byte < 0x80:
                    break
            if not 0 < length <= _MAX_NAME:
                raise MultiselectCommunicatorError("a protocol name of no sane length")
            line = await self._exactly(length)
            if not line.endswith(b"\n"):
                raise MultiselectCommunicatorError("not a line")
            return line[:-1].decode()
        except MultiselectCommunicatorError:
            raise
        except Exception as error:
            raise MultiselectCommunicatorError("the negotiation broke off") from error

    async def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = await self.read_writer.read(count - len(data))
            if not piece:
                raise MultiselectCommunicatorError("the stream ended")
            data += piece
        return bytes(data)


class Upgrader(TransportUpgrader):  # type: ignore[misc]
    """Noise, then this package's yamux."""

    def __init__(self, security: Any, muxers: Any, make: Callable[[Any, Any], Muxer]) -> None:
        super().__init__(secure_transports_by_protocol=security, muxer_transports_by_protocol=muxers)
        self._make = make

    async def upgrade_security(self, raw_conn: Any, is_initiator: bool, peer_id: Any = None) -> Any:
        """A secured connection; remembers its socket."""
        secured = await super().upgrade_security(raw_conn, is_initiator, peer_id)
        secured.plain_socket = getattr(raw_conn, "stream", None)
        return secured

    async def upgrade_connection(self, conn: Any, peer_id: Any) -> Any:
        """A multiplexed connection, whose peer is known and may from now on send what the windows allow."""
        muxers = self.muxer_multistream
        protocol, _ = await muxers._selector.select(conn, conn.is_initiator, muxers.negotiate_timeout)
        if isinstance(conn.plain_socket, Socket):
            conn.plain_socket.allowance = None
        muxer = self._make(conn, peer_id)
        return muxers._annotate_connection(muxer, conn, protocol)


class Conn(SwarmConn):  # type: ignore[misc]
    """A connection of which nothing escapes."""

    opened_at: float = 0.0

    async def start(self) -> None:
        """Accept streams until the connection ends."""
        try:
            await super().start()
        except Exception as error:  # noqa: BLE001  one connection's trouble is not the node's
            logger.info("connection with %s failed: %r", self.muxed_conn.peer_id, error)
            await self.close()
        finally:
            self.event_started.set()

    async def new_stream(self) -> Any:
        """A stream, of which nothing is left when this is cancelled. Raises MuxedStreamError."""
        muxed_stream = await self.muxed_conn.open_stream()
        try:
            return await self._add_stream(muxed_stream)
        except BaseException:
            muxed_stream.break_off(tell=True)
            raise

    async def _handle_muxed_stream(self, muxed_stream: Any) -> None:
        stream = None
        try:
            stream = await self._add_stream(muxed_stream)
            stream._direction = Direction.INBOUND
            await self.swarm.common_stream_handler(stream)
        except Exception as error:  # noqa: BLE001  what a peer sends can raise anything in libp2p's handlers
            logger.info("a stream of %s failed: %r", self.muxed_conn.peer_id, error)
            muxed_stream.break_off(tell=True)
        finally:
            if stream is not None:
                self.remove_stream(stream)


class Network(Swarm):  # type: ignore[misc]
    """The swarm. `self.connections` is libp2p's table; it is changed here only."""

    def __init__(self, peer_id: Any, peerstore: Any, upgrader: Upgrader, transport: Any, keeper: Keeper) -> None:
        config = ConnectionConfig(
            max_connections=10**6,
            min_connections=0,
            low_watermark=0,
            high_watermark=10**6,
            max_connections_per_peer=_PER_PEER,
            dial_timeout=DIAL_SECONDS,
            inbound_upgrade_timeout=DIAL_SECONDS,
            outbound_upgrade_timeout=DIAL_SECONDS,
        )
        super().__init__(peer_id, peerstore, upgrader, transports=[transport], connection_config=config)
        self._keeper = keeper
        self._handshakes: dict[trio.CancelScope, None] = {}  # in the order of their beginning
        self.retry_config.max_retries = 0
        # A peer that could not be reached is asked again when a caller says so.
        self._negative_peer_cache.ttl = self._negative_peer_cache._ttl = 1.0

    async def run(self) -> None:
        """Own all tasks of the connections."""
        async with trio.open_nursery() as nursery:
            self.background_nursery = nursery
            self.transport_manager.set_background_nursery(nursery)
            self.transport_manager.set_swarm(self)
            self.event_background_nursery_created.set()
            await trio.sleep_forever()

    def serve(self, address: str, listener: Listener) -> None:
        """Take connections of a listener."""

        self.listeners[address] = listener
        for sockets in listener.listeners:
            self.background_nursery.start_soon(self._accept, listener, sockets)

    async def _accept(self, listener: Listener, sockets: trio.SocketListener) -> None:
        with listener.scope, suppress(trio.ClosedResourceError):
            while True:
                try:
                    stream = await sockets.accept()
                except OSError as error:  # out of file descriptors, for one
                    logger.warning("cannot take a connection: %s", error)
                    await trio.sleep(0.5)
                    continue
                self.background_nursery.start_soon(self._take, stream)

    async def _take(self, stream: trio.SocketStream) -> None:
        await self._handle_inbound_connection(Socket(stream), None)

    async def _handle_inbound_connection(self, read_write_closer: Any, maddr: Any) -> None:
        if len(self._handshakes) >= _MAX_HANDSHAKES:
            # The oldest goes: an honest handshake is done long before it becomes that.
            next(iter(self._handshakes)).cancel()
        raw = RawConnection(read_write_closer, False)
        done = False
        with trio.CancelScope() as scope:
            self._handshakes[scope] = None
            try:
                await self.upgrade_inbound_raw_conn(raw, maddr)
                done = True
            except Exception as error:  # noqa: BLE001  anybody may send anything to an open port
                logger.debug("a connection from %s failed: %r", read_write_closer.get_remote_address(), error)
            finally:
                del self._handshakes[scope]
                if not done:
                    await trio.aclose_forcefully(read_write_closer.stream)

    async def add_conn(self, muxed_conn: Any, direction: str = "unknown") -> Any:
        """Register a connection whose peer has proven who it is. Raises SwarmException if the peer may not connect."""
        peer_id, inbound = muxed_conn.peer_id, direction != "outbound"
        conn = None
        try:
            self._check(peer_id, inbound)
            conn = Conn(muxed_conn, self, direction=direction)
            conn.set_transport_info(muxed_conn.get_transport_addresses(), muxed_conn.get_connection_type())
            conn.opened_at = trio.current_time()
            self.background_nursery.start_soon(muxed_conn.start)
            await muxed_conn.event_started.wait()
            self.background_nursery.start_soon(conn.start)
            await conn.event_started.wait()
            if muxed_conn.is_closed:
                raise SwarmException("the connection was closed at once")
            self._check(peer_id, inbound)
        except BaseException:
            with trio.CancelScope(shield=True), trio.move_on_after(1.0):
                await (conn or muxed_conn).close()
            raise
        older = list(self.connections.get(peer_id, ()))
        self.connections.setdefault(peer_id, []).append(conn)
        for other in older:  # the peer may have dialled anew because that one is dead
            self.background_nursery.start_soon(other.muxed_conn.probe, 3.0)
        if not older:
            self._keeper.came(str(peer_id))
        await self.notify_connected(conn)
        return conn

    def _check(self, peer_id: Any, inbound: bool) -> None:
        why = "this node is stopping" if self._closing else self._keeper.refusal(str(peer_id), inbound)
        if why is None and len(self.connections.get(peer_id, ())) >= _PER_PEER:
            why = "connected often enough"
        if why is not None:
            raise SwarmException(why)

    def remove_conn(self, swarm_conn: Any) -> None:
        """Forget a connection."""
        peer_id = swarm_conn.muxed_conn.peer_id
        before = self.connections.get(peer_id, [])
        after = [conn for conn in before if conn is not swarm_conn]
        if after:
            self.connections[peer_id] = after
        elif before:
            del self.connections[peer_id]
            self._keeper.went(str(peer_id))

    async def close_peer(self, peer_id: Any) -> None:
        """Close all connections with a peer."""
        for conn in list(self.connections.get(peer_id, ())):
            await conn.close()

    async def notify_disconnected(self, conn: Any) -> None:
        """Tell the listeners; never dial somebody else instead."""
        await self._notify("disconnected", conn)

    def live(self, peer_id: Any) -> list[Any]:
        """The connections with a peer that stand, the newest first."""
        return [conn for conn in reversed(self.connections.get(peer_id, ())) if not conn.muxed_conn.is_closed]

    async def new_stream(self, peer_id: Any) -> Any:
        """A stream on the newest connection, dialling if there is none. Raises SwarmException."""
        conns = self.live(peer_id) or [conn for conn in await self.dial_peer(peer_id) if not conn.muxed_conn.is_closed]
        if not conns:
            raise SwarmException("not connected")
        stream = await conns[0].new_stream()
        stream._direction = Direction.OUTBOUND
        return stream

    async def shut(self) -> None:
        """Close all listeners and connections, within about a second."""
        self._closing = True
        for listener in list(self.listeners.values()):
            await listener.close()
        with trio.move_on_after(1.0):
            async with trio.open_nursery() as nursery:
                for conns in list(self.connections.values()):
                    for conn in conns:
                        nursery.start_soon(conn.close)


class Endpoint(BasicHost):  # type: ignore[misc]
    """libp2p's host on that network: negotiation of inbound streams, and identify, in tasks that are owned."""

    async def _swarm_stream_handler(self, net_stream: Any) -> None:
        try:
            protocol, handler = await self.multiselect.negotiate(Negotiator(net_stream), int(STREAM_SECONDS))
        except Exception as error:  # noqa: BLE001  of many kinds, all meaning that there is no stream
            logger.debug("no protocol agreed with %s: %r", net_stream.muxed_conn.peer_id, error)
            await net_stream.reset()
            return
        if handler is None:
            await net_stream.reset()
            return
        net_stream.set_protocol(protocol)
        await handler(net_stream)

    def forget(self, peer_id: Any) -> None:
        """A peer has lost its last connection: on the next one it is asked again who it is."""
        self._identified_peers.pop(peer_id, None)
        with suppress(PeerStoreError):  # libp2p keeps what every stranger has said of itself for ever
            self.peerstore.clear_peerdata(peer_id)

    def _on_notifee_disconnected(self, conn: Any) -> None:
        """libp2p's own takes the peer for gone. This comes late: the peer may have another connection by now, on which
        nobody would ask it again."""
        peer_id = conn.muxed_conn.peer_id
        reason, asking = self._identified_peers.get(peer_id), peer_id in self._identify_inflight
        super()._on_notifee_disconnected(conn)
        if reason is not None and self._network.live(peer_id):
            self._identified_peers[peer_id] = reason
        if asking:  # the task ends by itself, and asks on the new connection
            self._identify_inflight.add(peer_id)

    def _schedule_identify(self, peer_id: Any, *, reason: str) -> None:
        if peer_id == self.get_id() or peer_id in self._identify_inflight or peer_id in self._identified_peers:
            return
        if self._should_identify_peer(peer_id):
            self._identify_inflight.add(peer_id)
            self._network.background_nursery.start_soon(self._identify, peer_id, reason)

    async def _identify(self, peer_id: Any, reason: str) -> None:
        """Ask until the peer has said who it is: what it speaks is known from nowhere else."""
        try:
            for pause in (*_IDENTIFY_PAUSES, 0.0):
                if await self._identified(peer_id, reason) or not self._network.live(peer_id):
                    return
                await trio.sleep(pause)
        finally:
            self._identify_inflight.discard(peer_id)

    async def _identified(self, peer_id: Any, reason: str) -> bool:
        stream = None
        try:
            with trio.fail_after(2 * STREAM_SECONDS):
                stream = await self._network.new_stream(peer_id)
                protocol = (identify.PROTOCOL,)
                await MultiselectClient().select_one_of(protocol, Negotiator(stream), int(STREAM_SECONDS))
                seen = await identify.learn(self.peerstore, peer_id, stream)
            live = self._network.live(peer_id)
            if live:
                self._identified_peers[peer_id] = reason
                if seen and live[0].get_connection_type() == ConnectionType.DIRECT:
                    addresses = self.get_transport_addrs()
                    self._observed_addr_manager.record_observation(live[0], Multiaddr(seen), addresses)
            return True
        except Exception as error:  # noqa: BLE001  see _handle_muxed_stream
            logger.debug("identify of %s failed: %r", peer_id, error)
            return False
        finally:
            if stream is not None:
                await finish(stream, clean=True)

    async def _push_identify_to_all_peers(self) -> None:
        """Not done: addresses are told at the next connection."""


def parse_peer(peer: str) -> Any:
    """The libp2p form of a peer id. Raises ValueError."""
    try:
        return ID.from_base58(peer)
    except Exception as error:
        raise ValueError(f"{peer!r} is not a peer id") from error
