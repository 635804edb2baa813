"""A libp2p stream as the socket of another connection, and the short messages of circuit relay v2 on it."""

from typing import Any, TypeVar

import trio
from libp2p.abc import ConnectionType
from libp2p.network.connection.raw_connection import RawConnection
from multiaddr import Multiaddr

from p2p.host.streams import Reader, finish
from p2p.host.tcp import Socket
from p2p.transport import TransportError

MAX_MESSAGE = 4096
"""Bytes of one control message; a few addresses and a signature."""

_CHUNK = 64 * 1024

M = TypeVar("M")


class Pipe:
    """Looks like one of trio's streams. What came behind a control message is not lost."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._reader = Reader(stream)
        self.closed = trio.Event()
        self._is_tunnel = False

    async def message(self, kind: type[M]) -> M:
        """The next control message. Raises TransportError."""
        try:
            length = await self._reader.varint()
            if length > MAX_MESSAGE:
                raise TransportError(f"a message of {length} bytes where {MAX_MESSAGE} are allowed")
            message: Any = kind()
            message.ParseFromString(await self._reader.exactly(length))
        except TransportError:
            raise
        except Exception as error:
            raise TransportError(f"no message came: {type(error).__name__} {error}") from error
        received: M = message
        return received

    async def say(self, message: Any) -> None:
        """Send a control message. Raises TransportError."""
        data = message.SerializeToString()
        length = bytes([len(data) & 0x7F | 0x80, len(data) >> 7]) if len(data) > 0x7F else bytes([len(data)])
        try:
            await self._stream.write(length + data)
        except Exception as error:
            raise TransportError(f"a message was not sent: {type(error).__name__} {error}") from error

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """As of trio.abc.ReceiveStream; b"" at the end, however it came."""
        self._is_tunnel = True
        most = max_bytes or _CHUNK
        try:
            await self._reader.wait()
            return self._reader.take(most)
        except EOFError:
            return b""
        except Exception as error:
            if "EOF" in type(error).__name__:
                return b""
            raise trio.BrokenResourceError(str(error)) from error

    async def send_all(self, data: bytes) -> None:
        """As of trio.abc.SendStream."""
        self._is_tunnel = True
        try:
            await self._stream.write(data)
        except Exception as error:
            raise trio.BrokenResourceError(str(error)) from error

    async def aclose(self) -> None:
        """Close the stream. One that has become a connection is broken off in both directions: it ends as a whole."""
        if not self.closed.is_set():
            self.closed.set()
            await finish(self._stream, clean=not self._is_tunnel)


class _Tunnel(Socket):
    def get_remote_address(self) -> tuple[str, int] | None:
        """None: the other end is behind a relay."""
        return None


def tunnelled(pipe: Pipe, address: str, initiator: bool) -> Any:
    """A raw connection through a pipe, to be secured and multiplexed as any other."""
    socket = _Tunnel(pipe)  # type: ignore[arg-type]
    return RawConnection(socket, initiator, ConnectionType.RELAYED, [Multiaddr(address)])
