"""Yamux's frames, and one stream of a connection. See `p2p.host.muxer`."""

import math
import struct
from typing import Protocol

import trio
from libp2p.abc import IMuxedStream
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset

WINDOW = 256 * 1024  # what yamux gives every stream at its start; it never grows here
MAX_BUFFERED = 4 * 1024 * 1024  # unread bytes of all streams of one connection
FRAME = 32 * 1024

HEADER = struct.Struct("!BBHII")
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
_MAX_SEND_WINDOW = 16 * 1024 * 1024
_LINGER_SECONDS = 10.0


class Violation(Exception):
    """The peer broke the rules of yamux."""


class Connection(Protocol):
    """What a stream needs of its connection."""

    streams: "dict[int, Stream]"
    buffered: int

    async def send_frame(self, frame: bytes) -> None:
        """Hand a frame to the writing task, waiting for room. Raises MuxedStreamError."""
        ...

    def send_control(self, kind: int, flags: int, stream_id: int, value: int) -> None:
        """Hand over a frame without a body, without waiting."""
        ...

    def forget(self, stream: "Stream") -> None:
        """A stream is over."""
        ...

    def get_remote_address(self) -> tuple[str, int] | None:
        """Host and port of the peer."""
        ...


class Stream(IMuxedStream):  # type: ignore[misc]
    """One stream. At most one window of unread bytes is kept, and writes never interleave."""

    def __init__(self, conn: Connection, stream_id: int) -> None:
        self.muxed_conn = self.conn = conn
        self.stream_id = stream_id
        self.send_closed = False
        self.recv_closed = False
        self.was_reset = False
        self.linger_until = math.inf
        self.send_window = WINDOW
        self._granted = WINDOW  # bytes that the peer may still send
        self._consumed = 0  # bytes read, not yet granted again
        self.buffer = bytearray()
        self._arrived = trio.lowlevel.ParkingLot()
        self._opened = trio.lowlevel.ParkingLot()
        self._writing = trio.Lock()

    async def read(self, n: int | None = None) -> bytes:
        """Up to `n` bytes, or all that are there. Raises MuxedStreamEOF or MuxedStreamReset."""
        await trio.lowlevel.checkpoint()
        while not self.buffer:
            if self.was_reset:
                raise MuxedStreamReset("the stream was reset")
            if self.recv_closed:
                raise MuxedStreamEOF("the peer has closed the stream")
            await self._arrived.park()
        take = len(self.buffer) if n is None or n < 0 else min(n, len(self.buffer))
        data = bytes(self.buffer[:take])
        del self.buffer[:take]
        self.conn.buffered -= take
        self._consumed += take
        if self._consumed >= WINDOW // 2 and not self.recv_closed and not self.was_reset:
            self.conn.send_control(WINDOW_UPDATE, 0, self.stream_id, self._consumed)
            self._granted += self._consumed
            self._consumed = 0
        if not self.buffer and self.recv_closed and self.send_closed:
            self.conn.forget(self)
        return data

    async def write(self, data: bytes) -> None:
        """Write all of `data`, waiting for the peer's window. Raises MuxedStreamError. Cancelled, it may have written
        a part, so the stream must then be reset."""
        async with self._writing:
            view = memoryview(data)
            while view:
                while self.send_window <= 0 and not self.send_closed:
                    await self._opened.park()
                if self.send_closed:
                    raise MuxedStreamReset("the stream was reset") if self.was_reset else MuxedStreamError("closed")
                take = min(self.send_window, FRAME, len(view))
                self.send_window -= take
                header = HEADER.pack(0, DATA, 0, self.stream_id, take)
                await self.conn.send_frame(header + bytes(view[:take]))
                view = view[take:]

    async def close_write(self) -> None:
        """Tell the peer that nothing more will be written."""
        if not self.send_closed:
            self.send_closed = True
            self._opened.unpark_all()
            self.conn.send_control(WINDOW_UPDATE, FIN, self.stream_id, 0)
        if self.recv_closed and not self.buffer:
            self.conn.forget(self)
        await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        """Close for writing; what the peer still sends may be read for some seconds."""
        self.linger_until = min(self.linger_until, trio.current_time() + _LINGER_SECONDS)
        await self.close_write()

    async def reset(self) -> None:
        """Break the stream off."""
        self.break_off(tell=True)
        await trio.lowlevel.checkpoint()

    def break_off(self, tell: bool) -> None:
        """End both directions now and forget what was not read."""
        if not self.was_reset:
            self.was_reset = self.send_closed = self.recv_closed = True
            if tell and self.conn.streams.get(self.stream_id) is self:
                self.conn.send_control(WINDOW_UPDATE, RST, self.stream_id, 0)
            self.conn.buffered -= len(self.buffer)
            self.buffer.clear()
            self._arrived.unpark_all()
            self._opened.unpark_all()
        self.conn.forget(self)

    def arrived(self, data: bytes) -> None:
        """Bytes from the peer. Raises Violation beyond its window."""
        self._granted -= len(data)
        if self._granted < 0:
            raise Violation("more bytes on a stream than its window allows")
        if self.recv_closed:
            return
        self.conn.buffered += len(data)
        if self.conn.buffered > MAX_BUFFERED:
            raise Violation("more unread bytes on one connection than this node keeps")
        self.buffer += data
        self._arrived.unpark_all()

    def finished(self) -> None:
        """The peer will send nothing more."""
        self.recv_closed = True
        self._arrived.unpark_all()
        if self.send_closed and not self.buffer:
            self.conn.forget(self)

    def widened(self, by: int) -> None:
        """The peer takes `by` more bytes."""
        self.send_window = min(self.send_window + by, _MAX_SEND_WINDOW)
        if by:
            self._opened.unpark_all()

    def set_deadline(self, ttl: int) -> None:
        """Not kept here: callers use cancel scopes."""
        raise NotImplementedError("use a cancel scope")

    def get_remote_address(self) -> tuple[str, int] | None:
        """Host and port of the peer."""
        address: tuple[str, int] | None = self.conn.get_remote_address()
        return address

    async def __aenter__(self) -> "Stream":
        return self
