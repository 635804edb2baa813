"""Connections of clients, each served by hypercorn: how many there may be, and how long an answer may stay unread."""

import socket
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, cast

import h11
import trio
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState, Framework
from hypercorn.utils import wrap_app

from node import logs

MAX_CONNECTIONS = 128
"""At a time. A file descriptor each: however many strangers connect, the node keeps its own."""

UNREAD_SECONDS = 10.0
"""A client that takes nothing for so long is cut off."""

_PIECE = 2**14
"""Bytes that have to be taken within that time: a slow line is no dead one."""

_RESTART_SECONDS = 1.0
_LOOK_SECONDS = 0.02

Handle = Callable[[trio.SocketStream], Awaitable[None]]


async def serve_connections(
    app: Framework, config: Config, listener: socket.socket, stop: trio.Event, ended: trio.Event
) -> None:
    """Serve until `stop`. A fault in a connection ends that one, and never the node.

    `hypercorn.trio.serve` would do, had it a limit: this is what it does, with one.
    """
    context = WorkerContext(None)
    wrapped = wrap_app(app, config.wsgi_max_body_size, "asgi")
    connections: set[trio.SocketStream] = set()

    async def handle(stream: trio.SocketStream) -> None:
        if len(connections) >= MAX_CONNECTIONS:
            await trio.aclose_forcefully(stream)
            return
        connections.add(stream)
        try:
            await _Http1Server(wrapped, config, context, ConnectionState({}), cast(trio.SSLStream, Patient(stream)))
        except Exception as error:  # noqa: BLE001 - whatever a client made the server stumble over
            logs.get().error("the HTTP server failed in a connection, which is closed", exc_info=error)
        finally:
            connections.discard(stream)
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)

    async def close_at_end() -> NoReturn:
        try:
            await trio.sleep_forever()
        finally:
            # hypercorn does not let itself be cancelled while it sends.
            with trio.CancelScope(shield=True):
                for stream in list(connections):
                    await trio.aclose_forcefully(stream)

    try:
        async with trio.open_nursery() as serving:
            serving.start_soon(close_at_end)
            async with trio.open_nursery() as accepting:
                accepting.start_soon(_accept, handle, listener, serving)
                await stop.wait()
                accepting.cancel_scope.cancel()
            await context.terminated.set()
            with trio.move_on_after(config.graceful_timeout):
                while connections:
                    await trio.sleep(_LOOK_SECONDS)
            serving.cancel_scope.cancel()
    finally:
        ended.set()


async def _accept(handle: Handle, listener: socket.socket, serving: trio.Nursery) -> NoReturn:
    while True:
        # A duplicate: trio closes what it is given, and the port is to stay taken.
        accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener.dup()))
        try:
            await trio.serve_listeners(handle, [accepting], handler_nursery=serving)
        except OSError as error:
            logs.get().error(f"the HTTP server cannot accept connections just now: {error}")
            await trio.sleep(_RESTART_SECONDS)


class _Http1Server(TCPServer):
    """Speaks HTTP/1.1 alone, whatever else a client asks for; hypercorn has no setting for that.

    In HTTP/2 a client says how much it takes, which may be nothing: what is sent to it then waits without end, and not
    in the socket, where `Patient` would see it. And hypercorn never closes a connection with half a WebSocket.
    """

    async def _read_data(self) -> None:
        protocol = cast(Any, self.protocol.protocol)
        begin = protocol._create_stream

        async def begin_plainly(request: h11.Request) -> None:
            headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
            version = request.http_version
            await begin(
                h11.Request(method=request.method, headers=headers, target=request.target, http_version=version)
            )

        protocol._check_protocol, protocol._create_stream = _stay, begin_plainly
        await super()._read_data()


async def _stay(request: h11.Request) -> None:
    """Go over to no other protocol: what asks for it may be answered in this one."""


class Patient:
    """A stream whose other end has to take what it is sent."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.socket = stream.socket

    async def send_all(self, data: bytes) -> None:
        """Raises BrokenResourceError for a client that takes nothing."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            # Cut off in its middle, the stream is closed; nothing more is sent.
            with trio.move_on_after(UNREAD_SECONDS) as scope:
                await self._stream.send_all(view[start : start + _PIECE])
            if scope.cancelled_caught:
                await trio.aclose_forcefully(self._stream)
                raise trio.BrokenResourceError(f"the client has taken nothing for {UNREAD_SECONDS:g} s")

    async def receive_some(self, size: int) -> bytes | bytearray:
        """See `trio.SocketStream`."""
        return await self._stream.receive_some(size)

    async def send_eof(self) -> None:
        """See `trio.SocketStream`."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """See `trio.SocketStream`."""
        await self._stream.aclose()
