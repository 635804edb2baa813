"""The HTTP server, inside the node's own event loop."""

import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from starlette.applications import Starlette

from node import logs
from node.api.answers import open_answers
from node.api.app import make_app
from node.api.current import CurrentLearner
from node.api.openai import routes
from node.api.settings import ApiSettings
from node.background import background
from node.errors import NodeError

_GRACE_SECONDS = 1.0
"""For what is being sent when the node stops."""

_UNREAD_SECONDS = 10
"""A client that takes nothing for so long is cut off: the server would wait for it even at its end."""

_RESTART_SECONDS = 1.0


class PortError(NodeError):
    """The endpoint cannot listen where it should."""


@asynccontextmanager
async def open_api(
    settings: ApiSettings, current: CurrentLearner, say: Callable[[str, str], None]
) -> AsyncIterator[str]:
    """The endpoint, at the address that is yielded, while the block runs.

    Raises PortError if it cannot listen there.
    """
    listener = _listen(settings)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    stop, ended = trio.Event(), trio.Event()
    with listener:
        async with open_answers(current, settings.max_tokens, settings.waiting) as answers, background() as nursery:
            nursery.start_soon(_serve, make_app(routes(answers)), listener, stop, ended)
            say("info", f"OpenAI-compatible endpoint at {address}/v1")
            try:
                yield address
            finally:
                stop.set()
                with trio.CancelScope(shield=True), trio.move_on_after(2 * _GRACE_SECONDS):
                    await ended.wait()


def _listen(settings: ApiSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family)
    except OSError as error:
        raise PortError(
            f"the endpoint cannot listen at {settings.host}, port {settings.port}: {error.strerror or error}. Set [api]"
            " port to another one, or to 0 for any that is free; each node of a machine needs its own"
        ) from error
    # Linux hands it on to each connection.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_SECONDS * 1000)
    return listener


async def _serve(app: Starlette, listener: socket.socket, stop: trio.Event, ended: trio.Event) -> None:
    """Serve until `stop`. A fault in a connection ends all of them at worst, and never the node."""
    try:
        while not stop.is_set():
            try:
                await serve(cast(Any, app), _config(listener), shutdown_trigger=stop.wait)
            except Exception as error:  # noqa: BLE001 - whatever a client made the server stumble over
                logs.get().error("the HTTP server failed and is started again", exc_info=error)
                await trio.sleep(_RESTART_SECONDS)
    finally:
        ended.set()


def _config(listener: socket.socket) -> Config:
    config = Config()
    # A duplicate: the server closes what it is given, and the port is to stay taken.
    config.bind = [f"fd://{os.dup(listener.fileno())}"]
    config.graceful_timeout = _GRACE_SECONDS
    config.include_server_header = False
    log = logging.getLogger("node.api")
    log.setLevel(logging.WARNING)
    config.errorlog = log
    return config
