"""Streams of bounded frames: four bytes of length, big-endian, then the frame. Every wait has a deadline."""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trio

from p2p.host.settings import PEER_STREAMS, STREAM_SECONDS
from p2p.transport import FrameTooLong, Serve, TransportError

logger = logging.getLogger(__name__)

_CHUNK = 64 * 1024  # written at once, so that a deadline bounds each piece and not a whole frame on a slow link
MAX_FRAME = 2**31 - 1


@contextmanager
def translated(peer: str, doing: str, seconds: float | None = None) -> Iterator[None]:
    """Give a deadline, STREAM_SECONDS by default, and turn every failure of libp2p into TransportError."""
    seconds = STREAM_SECONDS if seconds is None else seconds
    try:
        with trio.fail_after(seconds):
            yield
    except TransportError:
        raise
    except trio.TooSlowError:
        raise TransportError(f"{peer[-8:]} was too slow: {doing} took over {seconds:.0f} s") from None
    except Exception as error:
        raise TransportError(f"{doing} failed with {peer[-8:]}: {type(error).__name__} {error}".rstrip()) from error


class Reader:
    """Reads exact numbers of bytes from a libp2p stream, in as many pieces as it takes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def exactly(self, count: int) -> bytes:
        """The next `count` bytes. Raises EOFError, and what libp2p raises."""
        while len(self._buffer) < count:
            await self.more()
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    async def more(self) -> None:
        """Wait for more bytes. Raises EOFError, and what libp2p raises."""
        piece = await self._stream.read(_CHUNK)
        if not piece:
            raise EOFError("the stream ended")
        self._buffer += piece

    async def wait(self) -> None:
        """Wait until a byte is there. Raises EOFError, and what libp2p raises."""
        if not self._buffer:
            await self.more()

    def take(self, most: int) -> bytes:
        """Up to `most` of the bytes that are there."""
        data = bytes(self._buffer[:most])
        del self._buffer[:most]
        return data

    async def varint(self) -> int:
        """A protobuf varint of at most four bytes. Raises ValueError, EOFError, and what libp2p raises."""
        value = 0
        for shift in range(0, 28, 7):
            (byte,) = await self.exactly(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("a length of no sane size")


class FrameStream:
    """p2p.transport.Stream on a libp2p stream."""

    def __init__(self, peer: str, stream: Any) -> None:
        self._peer = peer
        self._stream = stream
        self._reader = Reader(stream)

    @property
    def peer(self) -> str:
        """Who is at the other end."""
        return self._peer

    async def send(self, frame: bytes) -> None:
        """Send one frame. Raises TransportError."""
        if len(frame) > MAX_FRAME:
            raise TransportError("a frame of more than 2 GiB")
        data = len(frame).to_bytes(4, "big") + frame
        for start in range(0, len(data), _CHUNK):
            with translated(self._peer, "sending"):
                await self._stream.write(data[start : start + _CHUNK])

    async def receive(self, limit: int) -> bytes:
        """The next frame, of at most `limit` bytes. Raises TransportError; FrameTooLong for a longer one."""
        with translated(self._peer, "receiving"):
            length = int.from_bytes(await self._reader.exactly(4), "big")
        if length > limit:
            raise FrameTooLong(f"{self._peer[-8:]} sent a frame of {length} bytes where {limit} are allowed")
        frame = bytearray()
        while len(frame) < length:
            with translated(self._peer, "receiving"):
                frame += await self._reader.exactly(min(_CHUNK, length - len(frame)))
        return bytes(frame)


async def finish(stream: Any, clean: bool) -> None:
    """Close or reset a stream, whatever state it is in, even when cancelled."""
    try:
        with trio.CancelScope(shield=True), trio.move_on_after(1.0):
            await (stream.close() if clean else stream.reset())
    except Exception as error:  # noqa: BLE001  a stream that is broken already
        logger.debug("closing a stream: %r", error)


@asynccontextmanager
async def opened(peer: str, open_stream: Callable[[], Any]) -> AsyncIterator[FrameStream]:
    """A stream for the time of a block: closed after it, reset if it fails. Raises TransportError."""
    with translated(peer, "opening a stream"):
        stream = await open_stream()
    clean = False
    try:
        yield FrameStream(peer, stream)
        clean = True
    finally:
        await finish(stream, clean)


def answering(protocol: str, serve: Serve) -> Callable[[Any], Any]:
    """The libp2p handler that answers a protocol, some streams of a peer at a time."""
    open_now: Counter[str] = Counter()

    async def handle(stream: Any) -> None:
        peer = str(stream.muxed_conn.peer_id)
        if open_now[peer] >= PEER_STREAMS:
            logger.debug("%s opens too many streams of %s", peer, protocol)
            await finish(stream, clean=False)
            return
        open_now[peer] += 1
        clean = False
        try:
            await serve(FrameStream(peer, stream))
            clean = True
        except TransportError as error:
            logger.debug("%s: %s", protocol, error)
        except Exception:
            logger.exception("answering %s on %s failed", peer, protocol)
        finally:
            open_now[peer] -= 1
            if not open_now[peer]:
                del open_now[peer]
            await finish(stream, clean)

    return handle
