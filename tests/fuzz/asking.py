"""HTTP requests given to an application as the server would hand them on, in one piece and without a socket."""

from collections.abc import Sequence
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

Headers = Sequence[tuple[bytes, bytes]]


async def answered(app: ASGIApp, first: bytes, headers: Headers, body: bytes) -> tuple[int, bytes]:
    """Status and body of the answer to a request with the first line `first`: method and target."""
    method, _, target = first.partition(b" ")
    path, _, query = target.partition(b"?")
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        # As the server does it: a method has letters, a path is unquoted.
        "method": method.decode("latin-1").upper(),
        "scheme": "http",
        "path": unquote(path.decode("ascii", "ignore")),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    pieces: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        return pieces.pop(0) if pieces else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
