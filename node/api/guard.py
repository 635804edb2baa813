"""Who may ask the node's HTTP server, what a browser may do with its answers, and how many ask at a time.

Two kinds of stranger are kept out. A page of another site that runs in the operator's browser: its name may resolve to
this machine (DNS rebinding), which the Host header gives away, or it sends a request from where it is, which the
browser marks with Origin and Sec-Fetch-Site. And whoever else reaches the port, by the token.
"""

import hmac
import ipaddress
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from node.api.contact import CLAIM
from node.api.errors import ApiError

MAX_REQUESTS = 64
"""Requests in hand at a time, event streams included; one more is told to come back later."""

_SAFE = {"GET", "HEAD"}

_HEADERS = (
    # Everything comes from this server, nothing is inline, and no other page may frame it.
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        b" base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


@dataclass(frozen=True)
class Rules:
    """`token` is asked for unless it is empty. Hosts are loopback names if `local`, else any address; and `names`."""

    token: str = ""
    local: bool = True
    names: frozenset[str] = frozenset()
    public: frozenset[str] = frozenset()
    """Paths that need no token: the dashboard's own files, which are the same on every node."""


class Guard:
    """Lets those requests through that `rules` allow."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules
        self._in_hand = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal.response()(scope, receive, guarded)
            return
        self._in_hand += 1
        try:
            await self._app(scope, receive, guarded)
        finally:
            self._in_hand -= 1

    def _refusal(self, scope: MutableMapping[str, Any]) -> ApiError | None:
        """Why this request gets no answer; None if it does."""
        headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        why = self._foreign(headers)
        if why is not None:
            return ApiError(403, why, code="forbidden")
        path, token = scope["path"], self._rules.token
        if token and path not in self._rules.public and not _carries(headers, token):
            return ApiError(
                401,
                "this node asks for its token: send `Authorization: Bearer TOKEN`; it stands in [api] token, or in the"
                " file api.token of the node's data directory",
                code="unauthorized",
            )
        changes = scope["method"] not in _SAFE and path.startswith("/api/")
        if changes and not token and not any(True for _ in _values(headers, CLAIM)):
            return ApiError(
                403, f"a request that changes something needs the header {CLAIM.decode()}: 1", code="forbidden"
            )
        if self._in_hand >= MAX_REQUESTS:
            return ApiError(503, f"{MAX_REQUESTS} requests are in hand already", code="overloaded", again=True)
        return None

    def _foreign(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """Why a request with these headers comes from a page of another site, or None."""
        hosts = list(_values(headers, b"host"))
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            where = "127.0.0.1, [::1] or localhost" if self._rules.local else "addresses"
            return f"this node answers at {where} and the names in [api] names alone"
        if set(_values(headers, b"origin")) - {f"http://{hosts[0]}", f"https://{hosts[0]}"}:
            return "this node does not answer pages of other sites"
        if set(_values(headers, b"sec-fetch-site")) - {"same-origin", "none"}:
            return "this node does not answer pages of other sites"
        return None

    def _is_ours(self, host: str) -> bool:
        """Whether the value of a Host header is a name for this server that no other site can have."""
        name, _, port = host.rpartition(":")
        if not port.isdecimal() or not name:
            name = host
        if name == "localhost" or name in self._rules.names:
            return True
        try:
            address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return address.is_loopback or not self._rules.local


def _values(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> Iterable[str]:
    return (value.decode("latin-1").lower() for key, value in headers if key.lower() == name)


def _carries(headers: Sequence[tuple[bytes, bytes]], token: str) -> bool:
    """Whether the request has the token. Takes as long for a nearly right one as for any other."""
    given = [value for key, value in headers if key.lower() == b"authorization"]
    scheme, _, value = (given[0] if len(given) == 1 else b"").partition(b" ")
    return hmac.compare_digest(value.strip(), token.encode()) and scheme.lower() == b"bearer"
