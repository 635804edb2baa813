"""The HTTP server, inside the node's own event loop."""

import errno
import logging
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

import trio
from hypercorn.config import Config as ServerConfig
from starlette.routing import Route

from node.api import openai, static
from node.api.answers import open_answers
from node.api.app import make_app
from node.api.connections import serve_connections
from node.api.contact import contactable, own_contact, token_in_force
from node.api.current import CurrentLearner
from node.api.firsts import FirstSuccesses
from node.api.guard import Rules
from node.api.history import kinds_by_round
from node.api.logtail import following
from node.api.settings import ApiSettings
from node.api.v1 import V1, Seen
from node.background import background
from node.errors import NodeError
from node.record import MetricsFile
from node.rounds_file import RecordError

_GRACE_SECONDS = 1.0
"""For what is being sent when the node stops."""

_PORTS = 64
"""Ports above the usual one that are tried where that is taken."""

FIRSTS = "firsts.json"

Say = Callable[[str, str], None]


class PortError(NodeError):
    """The server cannot listen where it should."""


@asynccontextmanager
async def open_api(
    settings: ApiSettings, current: CurrentLearner, say: Say, seen: Seen | None = None
) -> AsyncIterator[str]:
    """The server, at the address that is yielded, while the block runs. `seen` is the node that dashboard and control
    are of; without it, or with `dashboard` off, there is the OpenAI-compatible endpoint alone.

    Raises PortError if it cannot listen there, or TokenError.
    """
    listener = listen(settings, say)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    stop, ended = trio.Event(), trio.Event()
    with listener:
        token = token_in_force(settings, seen.data.path) if seen is not None else settings.token
        async with AsyncExitStack() as stack:
            routes: list[Route] = []
            public: frozenset[str] = frozenset()
            if settings.openai:
                answers = await stack.enter_async_context(open_answers(current, settings.max_tokens, settings.waiting))
                routes += openai.routes(answers)
            if seen is not None and settings.dashboard:
                routes += await stack.enter_async_context(_open_dashboard(seen, token))
                pages = static.pages()
                routes += static.routes(pages)
                public = frozenset(pages)
            nursery = await stack.enter_async_context(background())
            app = make_app(routes, Rules(token, settings.local, frozenset(settings.names), public))
            nursery.start_soon(serve_connections, cast(Any, app), _config(), listener, stop, ended)
            if seen is not None and settings.dashboard:
                stack.enter_context(contactable(seen.data.path, own_contact(_reached(address), token)))
            _introduce(settings, address, bool(public), say)
            try:
                yield address
            finally:
                stop.set()
                if seen is not None:
                    seen.feed.end()
                with trio.CancelScope(shield=True), trio.move_on_after(2 * _GRACE_SECONDS):
                    await ended.wait()


@asynccontextmanager
async def _open_dashboard(seen: Seen, token: str) -> AsyncIterator[Sequence[Route]]:
    """The routes of dashboard and control, with what feeds them."""
    v1, feed, data = V1(seen), seen.feed, seen.data
    firsts = data.path / FIRSTS

    def load() -> None:
        feed.firsts.load(firsts, data.pool_path)
        feed.history.load(MetricsFile(data.metrics_path), kinds_by_round(data.pool_path))

    with following(feed.log_line, token):
        try:
            await trio.to_thread.run_sync(load)
        except (OSError, sqlite3.Error, RecordError) as error:
            # Whoever needs the file to train says so; here it is only shown.
            feed.message("warning", f"earlier rounds are not shown in the dashboard: {error}")
        async with background() as nursery:
            nursery.start_soon(FirstSuccesses.keep, feed.firsts, firsts, data.pool_path, v1.limiter)
            yield v1.routes()


def listen(settings: ApiSettings, say: Say) -> socket.socket:
    """The listening socket. Raises PortError."""
    chosen = "port" in settings.model_fields_set or settings.port == 0
    last = settings.port if chosen else min(65535, settings.port + _PORTS)
    for port in range(settings.port, last + 1):
        try:
            listener = _listen(settings.host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port < last:
                continue
            raise PortError(
                f"the HTTP server cannot listen at {settings.host}, port {port}: {error.strerror or error}. Set [api]"
                " port to another one, or to 0 for any that is free; each node of a machine needs its own"
            ) from error
        if port != settings.port:
            say("info", f"port {settings.port} is taken, as by another node: the HTTP server has port {port}")
        return listener
    raise AssertionError("the last port either listens or raises")


def _listen(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _reached(address: str) -> str:
    """The address for this machine's own commands: an unspecified one is everywhere, loopback included."""
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _introduce(settings: ApiSettings, address: str, dashboard: bool, say: Say) -> None:
    if dashboard:
        how = "" if settings.local and not settings.token else ", which asks for the token"
        say("info", f"dashboard at {_reached(address)}{how}")
    if settings.openai:
        say("info", f"OpenAI-compatible endpoint at {address}/v1")
    if not settings.local:
        where = "[api] token" if settings.token else "api.token in the data directory"
        say(
            "warning",
            f"the HTTP server can be reached from other machines ({settings.host}): the token that it asks for is in"
            f" {where} and, like everything else, is sent unencrypted",
        )


def _config() -> ServerConfig:
    config = ServerConfig()
    config.graceful_timeout = _GRACE_SECONDS
    config.include_server_header = False
    log = logging.getLogger("node.api")
    log.setLevel(logging.WARNING)
    config.errorlog = log
    return config
