"""HTTP requests as the server hands them to the application: method, path, headers, body."""

from typing import Any, cast

import trio

from node.api.answers import Answers
from node.api.app import make_app
from node.api.errors import ApiError
from node.api.guard import Rules
from node.api.openai import routes
from tests.fuzz.asking import answered


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
    headers = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    status, _ = trio.run(answered, APP, first, headers, body)
    assert status in (200, 307, 400, 403, 404, 405, 408, 413, 503)
    hosts = [value for name, value in headers if name == b"host"]
    if status != 403:
        name = hosts[0].lower()
        assert len(hosts) == 1
        assert name.startswith((b"localhost", b"127.", b"[::1]", b"::1", b"[", b"0", b":")), hosts
