"""Programs and servers that answer tasks: what they may do wrong, and that no key gets out."""

import json
import logging
import os
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from node.commands.contributing import run_contribution
from node.config_sources import load, parse_flag
from node.contributing import remote as remote_module
from node.contributing.answers import NoAnswer, answer_of
from node.contributing.command import CommandError, CommandSource
from node.contributing.remote import Remote, RemoteError, RemoteSource, open_remote
from node.errors import ConfigError, NodeError
from rl.settings import PromptSettings
from verifiers.base import Example, Task, TaskRef

TASK = Task(TaskRef("fake", "1", "{}", 1, 1), "sum", "1 + 1 = ?", "2", Example("1 + 2 = ?", "3"))
KEY = "sk-very-secret"


def program(code: str, seconds: float = 20, longest: int = 100, as_json: bool = False) -> CommandSource:
    return CommandSource(f"{sys.executable} -S -c {shlex.quote(code)}", seconds, longest, as_json)


async def test_a_program_gets_the_question_and_prints_the_answer() -> None:
    code = "import sys, os; print(sys.stdin.read(), os.environ['SWARMNODE_SAMPLE'])"
    assert await program(code).answer(TASK, 3) == (b"1 + 1 = ?\n 3\n", True)
    said, _ = await program("import sys; print(sys.stdin.read())", as_json=True).answer(TASK, 0)
    told = json.loads(said)
    assert (told["prompt"], told["kind"], told["example"]) == (
        "1 + 1 = ?",
        "sum",
        {"prompt": "1 + 2 = ?", "answer": "3"},
    )
    assert "answer" not in told, "of the task"


async def test_a_program_that_fails_hangs_or_floods_has_no_answer(tmp_path: Path) -> None:
    with pytest.raises(NoAnswer, match="status 3: no idea"):
        await program("import sys; sys.exit(print('no idea', file=sys.stderr) or 3)").answer(TASK, 0)
    with pytest.raises(NoAnswer, match="more than 100 characters"):
        await program("while True: print('x' * 10_000)").answer(TASK, 0)
    left = tmp_path / "left"
    # What it started goes with it.
    shell = f"(sleep 0.6; touch {left}) & sleep 60"
    with pytest.raises(NoAnswer, match=r"longer than 0\.3 s"):
        await CommandSource(f"sh -c {shlex.quote(shell)}", 0.3, 100).answer(TASK, 0)
    junk, _ = await CommandSource("head -c 9 /dev/urandom /dev/zero", 20, 100).answer(TASK, 0)
    with pytest.raises(NoAnswer):
        answer_of(junk, 100)
    for line in ("", "'unclosed", "no-such-program-here x", "/dev/null", "a\0b"):
        with pytest.raises(CommandError):
            CommandSource(line, 1, 100).check()
    await trio.sleep(0.7)
    assert not left.exists()


Reply = Callable[[Mapping[str, str], Any], tuple[int, Mapping[str, str], bytes]]


class Server:
    """Answers each request with what `reply` makes of it, and counts."""

    def __init__(self, reply: Reply, port: int) -> None:
        self.reply, self.port, self.asked = reply, port, 0
        self.url = f"http://127.0.0.1:{port}/v1/"

    async def serve(self, stream: trio.SocketStream) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += await stream.receive_some()
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        assert first == "POST /v1/chat/completions HTTP/1.1"
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        while len(body) < int(headers["content-length"]):
            body += await stream.receive_some()
        self.asked += 1
        status, more, answer = self.reply(headers, json.loads(body))
        sent = "".join(f"{name}: {value}\r\n" for name, value in {"content-length": len(answer), **more}.items())
        await stream.send_all(f"HTTP/1.1 {status} X\r\n{sent}connection: close\r\n\r\n".encode() + answer)
        await stream.aclose()


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[Server]:
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    server = Server(reply, listener.socket.getsockname()[1])

    async def serve(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await server.serve(stream)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        yield server
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def asking(reply: Reply, seconds: float = 20) -> AsyncIterator[tuple[Server, RemoteSource]]:
    async with serving(reply) as server, open_remote(remote(server.url, seconds), {"OPENAI_API_KEY": KEY}) as source:
        yield server, source


def remote(url: str, seconds: float = 20) -> Remote:
    return Remote(url, "big", PromptSettings(system="Short."), 32, 0.7, 1.0, seconds, 100)


def completion(content: str | None, why: str = "stop") -> bytes:
    return json.dumps({"choices": [{"message": {"content": content}, "finish_reason": why}]}).encode()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(remote_module, "_LONGEST_PAUSE", 0.01)


async def test_a_model_elsewhere_is_asked_as_an_own_policy_would_be() -> None:
    seen: list[tuple[Mapping[str, str], Any]] = []

    def reply(headers: Mapping[str, str], asked: Any) -> tuple[int, Mapping[str, str], bytes]:
        seen.append((headers, asked))
        return 200, {}, completion("2", "stop" if len(seen) == 1 else "length")

    async with asking(reply) as (_, source):
        assert await source.answer(TASK, 0) == ("2", True)
        assert await source.answer(TASK, 1) == ("2", False)
    headers, asked = seen[0]
    assert headers["authorization"] == f"Bearer {KEY}"
    assert [message["content"] for message in asked["messages"]] == ["Short.", "1 + 2 = ?", "3", "1 + 1 = ?"]
    assert (asked["model"], asked["max_tokens"]) == ("big", 32)


async def test_a_busy_or_broken_server_is_asked_again_and_a_refusal_ends_it(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    busy = iter([(429, {"retry-after": "99999"}, b"{}"), (500, {}, b"\xff"), (200, {}, completion("2"))])
    async with asking(lambda headers, asked: next(busy)) as (server, source):
        assert await source.answer(TASK, 0) == ("2", True)
        assert server.asked == 3
    told: list[str] = []
    for status, words in (
        (401, "OPENAI_API_KEY"),
        (403, "OPENAI_API_KEY"),
        (404, "/v1"),
        (400, "refuses"),
        (302, "moved"),
    ):
        # Some servers repeat what they were sent.
        def refuse(
            headers: Mapping[str, str], asked: Any, status: int = status
        ) -> tuple[int, Mapping[str, str], bytes]:
            said = {"error": {"message": f"Incorrect key {headers['authorization']}\x1b[2J"}}
            return status, {"location": "http://127.0.0.1:1/"}, json.dumps(said).encode()

        async with asking(refuse) as (server, source):
            with pytest.raises(RemoteError, match=words) as refused:
                await source.answer(TASK, 0)
            assert server.asked == 1
            told.append(str(refused.value))
    assert all("********" in text and "\x1b" not in text for text in told)
    out, err = capfd.readouterr()
    assert KEY not in caplog.text + out + err + "".join(told)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"\xff\x00",
        b"[" * 100_000,
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{"message": {"content": 3}}]}',
    ],
)
async def test_a_reply_that_is_none_is_no_answer(body: bytes) -> None:
    async with asking(lambda headers, asked: (200, {}, body)) as (_, source):
        with pytest.raises(NoAnswer, match="no chat completion"):
            await source.answer(TASK, 0)


async def test_a_server_that_is_slow_endless_or_away_ends_in_no_answer() -> None:
    async with asking(lambda headers, asked: (200, {"content-length": str(2**40)}, b"x" * 2**21)) as (server, source):
        with pytest.raises(NoAnswer, match="more than 1 MiB"):
            await source.answer(TASK, 0)
        assert server.asked == 1
    async with asking(lambda headers, asked: (200, {"content-length": "9"}, b"x"), 0.1) as (server, source):
        with pytest.raises(NoAnswer, match=r"127\.0\.0\.1"):
            await source.answer(TASK, 0)
        assert 0 < server.asked <= remote_module.TRIES
        gone = server.port
    async with open_remote(remote(f"http://127.0.0.1:{gone}/v1?key={KEY}"), {}) as source:
        with pytest.raises(NoAnswer, match=str(gone)) as failed:
            await source.answer(TASK, 0)
        assert KEY not in str(failed.value)
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    silent = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/v1"
    async with listener, open_remote(remote(silent, 0.05), {}) as source:
        with pytest.raises(NoAnswer, match=r"0\.05 s"):
            await source.answer(TASK, 0)


async def test_a_server_that_drips_is_cut_off() -> None:
    async def drip(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.send_all(b"HTTP/1.1 200 X\r\ncontent-length: 1000000\r\n\r\n")
            while True:
                await stream.send_all(b" ")
                await trio.sleep(0.01)

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, drip, [listener])
            url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/v1"
            async with open_remote(remote(url, 0.2), {}) as source:
                with pytest.raises(NoAnswer, match="--timeout"):
                    await source.answer(TASK, 0)
            nursery.cancel_scope.cancel()


def test_a_key_goes_into_no_url_and_unencrypted_to_no_other_machine() -> None:
    environ = {"OPENAI_API_KEY": KEY}
    for url in ("http://192.0.2.1/v1", "http://example.org/v1", "http://localhost.example.org"):
        with pytest.raises(RemoteError, match="not encrypted") as refused:
            remote(url).key(environ)
        assert KEY not in str(refused.value)
        assert remote(url).key({}) == "", "without a key there is nothing to tell"
    for url in ("https://example.org/v1", "http://127.0.0.1:8000/v1", "http://localhost/v1", "http://[::1]:1/v1"):
        assert remote(url).key(environ) == KEY
    for url in (
        "ftp://example.org",
        "example.org/v1",
        "",
        "http://",
        "http://host:99999/v1",
        f"https://user:{KEY}@example.org/v1",
    ):
        with pytest.raises(RemoteError) as refused:
            _ = remote(url).endpoint
        assert KEY not in str(refused.value)
    assert (
        remote(f"https://example.org/v1?key={KEY}#x").endpoint == f"https://example.org/v1/chat/completions?key={KEY}"
    )
    for bad in (f"{KEY}\nx", f"{KEY} x", f"{KEY}\u00e9"):
        with pytest.raises(RemoteError, match="OPENAI_API_KEY") as refused:
            remote("https://example.org/v1").key({"OPENAI_API_KEY": bad})
        assert KEY not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"command": "cat", "url": "https://x/v1", "model": "m"}, "exclude"),
        ({"url": "https://x/v1"}, "--model"),
        ({"model": "m"}, "--openai"),
        ({"as_json": True}, "--json"),
        ({"command": "no-such-program-here"}, "no-such-program-here"),
        ({"url": "nonsense", "model": "m"}, "--openai"),
        ({"silo": True}, "silo"),
        ({"share": "none"}, "share"),
    ],
)
def test_flags_that_make_no_sense_are_refused_before_anything_is_opened(
    tmp_path: Path, given: Mapping[str, Any], words: str
) -> None:
    flags = [f"node.data_dir={tmp_path / 'node'}"]
    flags += [f"sharing.{name}={given[name]}" for name in ("silo", "share") if name in given]
    loaded = load([parse_flag(flag) for flag in flags], environ={})
    with pytest.raises(NodeError, match=words) as refused:
        run_contribution(
            loaded,
            given.get("command"),
            given.get("as_json", False),
            given.get("url"),
            given.get("model"),
            "OPENAI_API_KEY",
            1.0,
            None,
            1,
        )
    assert isinstance(refused.value, (ConfigError, CommandError, RemoteError)) or "sharing" in str(refused.value)
    assert not os.path.exists(tmp_path / "node")
