"""TCP below libp2p: reads that come whole, a bound on what a stranger may send, and listeners owned by a nursery."""

import errno
from typing import Any

import trio
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP
from libp2p.utils.multiaddr_utils import extract_ip_from_multiaddr, multiaddr_from_socket
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from p2p.host.settings import ListenError, PortTakenError

HANDSHAKE_BYTES = 64 * 1024
_CHUNK = 64 * 1024
_WHOLE = 2**16 + 2  # a noise message and its length


class Socket(TrioTCPStream):  # type: ignore[misc]
    """A connected socket whose `read(n)` returns n bytes, not fewer, as long as n is of a sane size.

    libp2p reads until it has what it wants but gives up after a hundred pieces, which a slow link with small segments
    exceeds within one noise message.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self.allowance: int | None = HANDSHAKE_BYTES
        self._remote: tuple[str, int] | None = None
        self._buffer = bytearray()

    async def read(self, n: int | None = None) -> bytes:
        """Bytes from the peer; fewer than `n`, or none, only at the end. Raises ConnectionClosedError."""
        want = n if n is not None and 0 <= n <= _WHOLE else 1
        while len(self._buffer) < want:
            data = await super().read(_CHUNK)
            if not data:
                break
            self._buffer += data
        count = len(self._buffer) if n is None or n < 0 else min(n, len(self._buffer))
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        if self.allowance is not None:
            self.allowance -= count
            if self.allowance < 0:
                raise ConnectionClosedError("too long a handshake", transport="tcp")
        return data

    def get_remote_address(self) -> tuple[str, int] | None:
        """Host and port of the peer, of IPv6 too."""
        if self._remote is None:
            try:
                host, port, *_ = self.stream.socket.getpeername()
            except OSError:
                return None
            self._remote = (str(host), int(port))
        return self._remote


class Listener:
    """The sockets of one address that is listened on."""

    def __init__(self, listeners: list[trio.SocketListener]) -> None:
        self.listeners = listeners
        self.scope = trio.CancelScope()

    def get_addrs(self) -> tuple[Any, ...]:
        """The multiaddrs of the sockets, with the port that was given out."""
        return tuple(multiaddr_from_socket(listener.socket) for listener in self.listeners)

    async def close(self) -> None:
        """Listen no more."""
        self.scope.cancel()
        self.abandon()
        await trio.lowlevel.checkpoint()

    def abandon(self) -> None:
        """Close the sockets."""
        for listener in self.listeners:
            listener.socket.close()
        self.listeners = []


async def open_listener(address: str) -> Listener:
    """Listen on a multiaddr such as /ip4/0.0.0.0/tcp/4747. Raises ListenError.

    Without SO_REUSEPORT, which libp2p sets: with it two nodes of one user share a port, and each gets some of the
    connections.
    """
    try:
        parsed = Multiaddr(address)
        names = [protocol.name for protocol in parsed.protocols()]
        host = extract_ip_from_multiaddr(parsed)
        port = int(parsed.value_for_protocol("tcp"))
    except (MultiaddrError, ValueError, LookupError) as error:
        raise ListenError(f"cannot listen on {address}: not a multiaddr like /ip4/0.0.0.0/tcp/4747") from error
    if host is None or len(names) != 2:
        raise ListenError(f"cannot listen on {address}: only TCP on an IP address, like /ip4/0.0.0.0/tcp/4747")
    try:
        return Listener(list(await trio.open_tcp_listeners(port, host=host)))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(f"cannot listen on {address}: the port is in use") from error
        raise ListenError(f"cannot listen on {address}: {error.strerror or error}") from error


class Tcp(TCP):  # type: ignore[misc]
    """libp2p's TCP transport, dialling through Socket."""

    async def _dial_resolved(self, maddr: Any, source: tuple[str, int] | None = None) -> Any:
        host = extract_ip_from_multiaddr(maddr)
        try:
            port = int(maddr.value_for_protocol("tcp"))
        except (MultiaddrError, ValueError, TypeError, LookupError) as error:
            raise OpenConnectionError(f"no TCP port in {maddr}") from error
        if host is None:
            raise OpenConnectionError(f"no IP address in {maddr}")
        try:
            stream = await trio.open_tcp_stream(host, port)
        except OSError as error:
            raise OpenConnectionError(f"{error.strerror or error}") from error
        return RawConnection(Socket(stream), True)

    def create_listener(self, handler_function: Any) -> Any:
        """Not used: the host opens its listeners itself."""
        raise SwarmException("listen through the host")
