"""HTTP requests as the server hands them to the application: method, path, headers, body."""

from typing import Any, cast
from urllib.parse import unquote

import trio
from starlette.types import Message, Scope

from node.api.answers import Answers
from node.api.app import make_app
from node.api.errors import ApiError
from node.api.guard import Rules
from node.api.openai import routes


class _Current:
    def __init__(self) -> None:
        self.description = {"public_name": "tiny", "model": "tiny"}


class _Answers:
    current = _Current()

    def ask(self, request: Any) -> Any:
        raise ApiError(503, "nobody is here", code="not_ready", again=True)


APP = make_app(routes(cast(Answers, _Answers())), Rules())


def seeds() -> list[bytes]:
    host = b"host: 127.0.0.1:8000\n"
    body = b'\n{"messages": [{"role": "user", "content": "hello"}]}'
    return [
        b"GET /v1/models\n" + host,
        b"GET /v1/models/tiny?x=1\nhost: localhost\n",
        b"POST /v1/chat/completions\n" + host + b"origin: http://127.0.0.1:8000\n" + body,
        b"POST /v1/chat/completions\nhost: [::1]:80\norigin: http://[::1]:80\nsec-fetch-site: same-origin\n" + body,
        b"OPTIONS /v1/chat/completions\nhost: example.org\norigin: http://example.org\nsec-fetch-site: cross-site\n",
    ]


def run(data: bytes) -> None:
    head, _, body = data.partition(b"\n\n")
    first, *lines = head.split(b"\n")
    method, _, target = first.partition(b" ")
    path, _, query = target.partition(b"?")
    headers = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
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
    status, _ = trio.run(_answer, scope, body)
    assert status in (200, 307, 400, 403, 404, 405, 408, 413, 503)
    hosts = [value for name, value in headers if name == b"host"]
    if status != 403:
        name = hosts[0].lower()
        assert len(hosts) == 1
        assert name.startswith((b"localhost", b"127.", b"[::1]", b"::1", b"[", b"0", b":")), hosts


async def _answer(scope: Scope, body: bytes) -> tuple[int, bytes]:
    pieces: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        return pieces.pop(0) if pieces else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await APP(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
