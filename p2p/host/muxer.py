"""The yamux multiplexer, with every bound enforced: windows, streams, buffered bytes and silence.

py-libp2p's own muxer counts a peer's receive window without acting on it, gives up a blocked write after five seconds,
answers pings from its reading task and so stops reading while its socket is full, and never notices a peer that is
gone without a word. This one speaks the same protocol with one writing task for a connection, which is what makes a
cancelled write safe: only whole frames are ever handed to the cipher.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import trio
from libp2p.abc import IMuxedConn
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError

from p2p.host.yamux import (
    ACK,
    DATA,
    FIN,
    FRAME,
    GO_AWAY,
    HEADER,
    PING,
    RST,
    SYN,
    WINDOW,
    WINDOW_UPDATE,
    Stream,
    Violation,
)

logger = logging.getLogger(__name__)

MAX_INBOUND = 64
MAX_OUTBOUND = 256
_QUEUE = 512 * 1024  # bytes that wait for the socket before a stream has to wait
_MAX_QUEUED_FRAMES = 8192  # a peer that reads nothing while it makes us answer
_WRITE_SECONDS = 15.0


class Muxer(IMuxedConn):  # type: ignore[misc]
    """One connection. `violated` is told of a peer that breaks the rules; the connection is then closed."""

    def __init__(
        self, secured: Any, peer_id: Any, violated: Callable[[str, str], None], ping_seconds: float = 5.0
    ) -> None:
        self.secured_conn = secured
        self.peer_id = peer_id
        self.is_initiator_value: bool = secured.is_initiator
        self.streams: dict[int, Stream] = {}
        self.buffered = 0
        self.on_close: Callable[[], Any] | None = None
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self._violated = violated
        self._ping_seconds = ping_seconds
        self._next_id = 1 if self.is_initiator_value else 2
        self._accept_send, self._accept = trio.open_memory_channel[Stream](MAX_INBOUND)
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._queue_room = trio.lowlevel.ParkingLot()
        self._queue_filled = trio.lowlevel.ParkingLot()
        self._read_buffer = bytearray()
        self._heard = trio.current_time()
        self._pinged = self._rtt = 0.0
        self._scope: trio.CancelScope | None = None
        self._closing = False

    @property
    def is_initiator(self) -> bool:
        """Whether this side dialled."""
        return self.is_initiator_value

    @property
    def is_established(self) -> bool:
        """Whether streams can be opened."""
        return self.event_started.is_set() and not self._closing

    @property
    def is_closed(self) -> bool:
        """Whether the connection is closed or about to be."""
        return self._closing

    def rtt(self) -> float:
        """Seconds that the last ping took; 0 before the first."""
        return self._rtt

    def get_transport_addresses(self) -> list[Any]:
        """The peer's multiaddrs."""
        addresses: list[Any] = self.secured_conn.get_transport_addresses()
        return addresses

    def get_connection_type(self) -> Any:
        """Direct or relayed."""
        return self.secured_conn.get_connection_type()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Host and port of the peer."""
        address: tuple[str, int] | None = self.secured_conn.get_remote_address()
        return address

    async def start(self) -> None:
        """Run the connection until it ends. Never raises on what the peer does."""
        try:
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                if self._closing:
                    return
                nursery.start_soon(self._write_loop)
                nursery.start_soon(self._watch)
                self.event_started.set()
                await self._read_loop()
                nursery.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001  the cipher, the socket and libp2p raise what they like
            logger.debug("connection with %s ended: %r", self.peer_id, error)
        finally:
            self.event_started.set()
            with trio.CancelScope(shield=True):
                await self._end()

    async def close(self) -> None:
        """Say goodbye, if the peer reads, and close."""
        if not self._closing and self._scope is not None:
            self.send_control(GO_AWAY, 0, 0, 0)
            with trio.move_on_after(0.2):
                while self._queue and not self._closing:
                    await self._queue_room.park()
        await self._end()

    async def _end(self) -> None:
        first, self._closing = not self._closing, True
        if self._scope is not None:
            self._scope.cancel()
        for stream in list(self.streams.values()):
            stream.break_off(tell=False)
        self._accept_send.close()
        self._queue.clear()
        self._queued = 0
        self._queue_room.unpark_all()
        if not first:
            return
        try:
            with trio.CancelScope(shield=True), trio.move_on_after(1.0):
                await self.secured_conn.close()
        except Exception as error:  # noqa: BLE001  a socket that is broken already
            logger.debug("closing the connection with %s: %r", self.peer_id, error)
        finally:
            self.event_closed.set()
            if self.on_close is not None:
                await self.on_close()

    # Streams

    async def open_stream(self) -> Stream:
        """A new stream. Raises MuxedStreamError."""
        if self._closing:
            raise MuxedStreamError("the connection is closed")
        if sum(self._is_own(stream_id) for stream_id in self.streams) >= MAX_OUTBOUND:
            raise MuxedStreamError("too many open streams on one connection")
        stream = self.streams[self._next_id] = Stream(self, self._next_id)
        self._next_id += 2
        try:
            await self.send_frame(HEADER.pack(0, WINDOW_UPDATE, SYN, stream.stream_id, 0))
        except BaseException:  # cancelled, for one: nobody else knows of the stream, so nobody would ever end it
            stream.break_off(tell=True)
            raise
        return stream

    async def accept_stream(self) -> Stream:
        """The next stream that the peer opens. Raises MuxedConnUnavailable when the connection is closed."""
        try:
            return await self._accept.receive()
        except trio.EndOfChannel:
            raise MuxedConnUnavailable("the connection is closed") from None

    def forget(self, stream: Stream) -> None:
        """A stream is over."""
        if self.streams.get(stream.stream_id) is stream:
            del self.streams[stream.stream_id]

    def _is_own(self, stream_id: int) -> bool:
        return stream_id % 2 == self._next_id % 2

    # Writing

    async def send_frame(self, frame: bytes) -> None:
        """Hand a frame to the writing task, waiting for room. Raises MuxedStreamError."""
        while self._queued >= _QUEUE and not self._closing:
            await self._queue_room.park()
        if self._closing:
            raise MuxedStreamError("the connection is closed")
        self._put(frame)
        await trio.lowlevel.checkpoint()

    def send_control(self, kind: int, flags: int, stream_id: int, value: int) -> None:
        """Hand over a frame without a body, without waiting; a peer that lets too many pile up is cut off."""
        if self._closing:
            return
        if len(self._queue) >= _MAX_QUEUED_FRAMES:
            self._break("does not read what it makes this node answer")
            return
        self._put(HEADER.pack(0, kind, flags, stream_id, value))

    def _put(self, frame: bytes) -> None:
        self._queue.append(frame)
        self._queued += len(frame)
        self._queue_filled.unpark_all()

    async def _write_loop(self) -> None:
        while True:
            while not self._queue:
                await self._queue_filled.park()
            batch = bytearray()
            while self._queue and len(batch) < FRAME:
                batch += self._queue.popleft()
            with trio.move_on_after(_WRITE_SECONDS) as deadline:
                await self.secured_conn.write(bytes(batch))
            if deadline.cancelled_caught:
                raise TimeoutError("the peer has stopped reading")
            self._queued = max(0, self._queued - len(batch))
            self._queue_room.unpark_all()

    # Reading

    async def _need(self, count: int) -> None:
        while len(self._read_buffer) < count:
            data = await self.secured_conn.read(None)
            if not data:
                raise EOFError("the peer has closed the connection")
            self._heard = trio.current_time()
            self._read_buffer += data

    def _take(self, count: int) -> bytes:
        data = bytes(self._read_buffer[:count])
        del self._read_buffer[:count]
        return data

    async def _read_loop(self) -> None:
        try:
            while True:
                await self._need(HEADER.size)
                version, kind, flags, stream_id, length = HEADER.unpack(self._take(HEADER.size))
                if version != 0 or kind > GO_AWAY:
                    raise Violation("not a yamux frame")
                if kind == GO_AWAY:
                    return
                if kind == PING:
                    self._ping_arrived(flags, length)
                else:
                    await self._stream_frame(kind, flags, stream_id, length)
                await trio.lowlevel.checkpoint_if_cancelled()
        except Violation as error:
            self._break(str(error))

    def _break(self, what: str) -> None:
        if not self._closing:
            logger.debug("connection with %s: %s", self.peer_id, what)
            self._violated(str(self.peer_id), what)
        if self._scope is not None:
            self._scope.cancel()

    def _ping_arrived(self, flags: int, nonce: int) -> None:
        if flags & SYN:
            self.send_control(PING, ACK, 0, nonce)
        elif flags & ACK:
            self._rtt = trio.current_time() - self._pinged

    async def _stream_frame(self, kind: int, flags: int, stream_id: int, length: int) -> None:
        if flags & SYN:
            self._syn(stream_id)
        if kind == DATA and length:
            if length > WINDOW:
                raise Violation("a frame larger than a window")
            await self._need(length)
            data = self._take(length)
        stream = self.streams.get(stream_id)
        if stream is None:  # closed here a moment ago, or refused
            return
        if kind == WINDOW_UPDATE:
            stream.widened(length)
        elif length:
            stream.arrived(data)
        if flags & FIN:
            stream.finished()
        if flags & RST:
            stream.break_off(tell=False)

    def _syn(self, stream_id: int) -> None:
        if self._is_own(stream_id) or stream_id == 0 or stream_id in self.streams:
            raise Violation("a new stream under a number that is not the peer's to give")
        if sum(not self._is_own(number) for number in self.streams) >= MAX_INBOUND:
            self.send_control(WINDOW_UPDATE, RST, stream_id, 0)
            return
        stream = Stream(self, stream_id)
        try:
            self._accept_send.send_nowait(stream)
        except trio.WouldBlock:
            self.send_control(WINDOW_UPDATE, RST, stream_id, 0)
            return
        self.streams[stream_id] = stream
        self.send_control(WINDOW_UPDATE, ACK, stream_id, 0)

    # Silence

    async def probe(self, seconds: float) -> None:
        """Close the connection unless the peer is heard within `seconds`."""
        asked = trio.current_time()
        self.send_control(PING, SYN, 0, 0)
        await trio.sleep(seconds)
        if self._heard < asked and self._scope is not None:
            self._scope.cancel()

    async def _watch(self) -> None:
        nonce = 0
        while True:
            before = trio.current_time()
            await trio.sleep(self._ping_seconds)
            now = trio.current_time()
            if now - before > 2 * self._ping_seconds:
                self._heard = now  # this process was stopped: that says nothing of the peer
            elif now - self._heard > 3 * self._ping_seconds:
                raise TimeoutError("the peer is silent")
            for stream in [stream for stream in self.streams.values() if stream.linger_until < now]:
                stream.break_off(tell=True)
            nonce = (nonce + 1) % 2**32
            self._pinged = now
            self.send_control(PING, SYN, 0, nonce)
