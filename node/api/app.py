"""The application: routes, who may ask, and what an error looks like."""

import ipaddress
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from node.api.errors import ApiError


def make_app(routes: Sequence[BaseRoute]) -> Starlette:
    """An application that answers this machine's own programs alone."""
    return Starlette(
        routes=routes,
        middleware=[Middleware(OwnMachine)],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _fault},
    )


class OwnMachine:
    """Refuses what a web page of another site makes a browser ask.

    A page may have its own name resolve to 127.0.0.1 (DNS rebinding): the Host header gives it away. Or it sends a
    request from where it is: the browser then names that page's Origin.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        if scope["type"] == "http" and (why := _refusal(scope["headers"])) is not None:
            await ApiError(403, why, code="forbidden").response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _refusal(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Why a request with these headers is none of this machine's own programs, or None."""

    def all_of(name: bytes) -> list[str]:
        return [value.decode("latin-1").lower() for key, value in headers if key.lower() == name]

    hosts = all_of(b"host")
    if len(hosts) != 1 or not _is_loopback(hosts[0]):
        return "this endpoint answers at 127.0.0.1, [::1] or localhost alone"
    if any(origin != f"http://{hosts[0]}" for origin in all_of(b"origin")):
        return "this endpoint does not answer pages of other sites"
    if set(all_of(b"sec-fetch-site")) - {"same-origin", "none"}:
        return "this endpoint does not answer pages of other sites"
    return None


def _is_loopback(host: str) -> bool:
    """Whether the value of a Host header names this machine itself."""
    name, _, port = host.rpartition(":")
    if not port.isdecimal() or not name:
        name = host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # Not `request.url`, which cannot be had of a query that is no UTF-8.
    response = ApiError(error.status_code, f"{request.method} {request.scope['path']}: {error.detail}").response()
    response.headers.update(error.headers or {})
    return response


async def _fault(request: Request, error: Exception) -> Response:
    """A fault of ours. It is logged by the server that gets it next, with its traceback."""
    return ApiError(500, "a fault of the node, see its log", code="internal_error").response()
