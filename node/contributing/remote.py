"""Answers of a model elsewhere, over the chat completions of an OpenAI-compatible server.

The key comes from the environment, goes into one header, and nowhere else: no message and no log line holds it, and it
is not sent unencrypted to another machine.
"""

import ipaddress
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import trio
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from node.contributing.answers import NoAnswer
from node.errors import NodeError
from node.text import clean
from rl.settings import PromptSettings
from verifiers.base import Task

TRIES = 4
"""Requests for one answer, where the server is out of reach, busy or broken."""

_PAUSE_SECONDS, _LONGEST_PAUSE = 1.0, 60.0
_ANSWER_BYTES = 2**20
"""What a reply may hold beside the answer's own characters: some servers repeat the prompt, or send log-probs."""
_QUOTED = 300

_TEMPORARY = {408, 409, 425, 429}
_ADVICE = {
    401: "the key is wrong or missing: set {variable}",
    403: "the key may not do this: set {variable} to another",
    404: "look at the URL, which usually ends in /v1, and at --model",
}


class RemoteError(NodeError):
    """The server cannot be used as it was asked for."""

    exit_status = 2


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Reply(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1)]


@dataclass(frozen=True)
class Remote:
    """Which model to ask, and how. `variable` is the environment variable with the key; not set, none is sent."""

    url: str
    model: str
    prompt: PromptSettings
    max_tokens: int
    temperature: float
    top_p: float
    seconds: float
    longest: int
    variable: str = "OPENAI_API_KEY"

    @property
    def endpoint(self) -> httpx.URL:
        """Where requests go. Raises RemoteError for a URL that cannot be one, or that holds a password."""
        try:
            url = httpx.URL(self.url)
            url = url.copy_with(path=url.path.rstrip("/") + "/chat/completions", fragment=None)
        except (httpx.InvalidURL, UnicodeError) as error:
            raise RemoteError(f"--openai: {error}") from error
        if url.userinfo:
            raise RemoteError(f"--openai: a URL must hold no user or password: put the key into {self.variable}")
        if url.scheme not in ("http", "https") or not url.host or not 0 < (url.port or 80) < 2**16:
            raise RemoteError("--openai wants a URL such as https://api.example.org/v1")
        return url

    def key(self, environ: Mapping[str, str]) -> str:
        """The key, or nothing. Raises RemoteError as `endpoint` does, for what is no key, or if it would travel
        unencrypted.
        """
        endpoint = self.endpoint
        key = environ.get(self.variable, "").strip()
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise RemoteError(f"{self.variable} holds something that is no key: letters, digits and signs are")
        if key and endpoint.scheme == "http" and not _is_here(endpoint.host):
            raise RemoteError(
                f"{_shown(endpoint)} is not encrypted, and tells the key in {self.variable} to all on the way: use"
                " https, or name another variable with --key-env"
            )
        return key


def _shown(url: httpx.URL) -> str:
    """As it may be said: some servers take a key in the query."""
    return str(url.copy_with(query=None))


def _is_here(host: str) -> bool:
    """Whether a host is this machine, by its name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@asynccontextmanager
async def open_remote(remote: Remote, environ: Mapping[str, str] = os.environ) -> AsyncIterator["RemoteSource"]:
    """Connections to the server, for the time of a block. Raises RemoteError before anything is sent."""
    url, key = remote.endpoint, remote.key(environ)
    headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
    # A proxy cannot know what is meant by this machine's own addresses.
    async with httpx.AsyncClient(headers=headers, timeout=remote.seconds, trust_env=not _is_here(url.host)) as client:
        yield RemoteSource(remote, client, url, key)


class _Again(Exception):
    """It may work a little later; after so many seconds, if the server said."""

    def __init__(self, why: str, after: float = 0.0) -> None:
        super().__init__(why)
        self.after = after


class RemoteSource:
    """`node.contributing.asking.Source` over HTTP. Made by `open_remote`."""

    def __init__(self, remote: Remote, client: httpx.AsyncClient, url: httpx.URL, key: str) -> None:
        self._remote = remote
        self._client = client
        self._url = url
        self._where = _shown(url)
        self._key = key

    @property
    def name(self) -> str:
        """See `node.contributing.asking.Source`."""
        return self._remote.model

    async def answer(self, task: Task, sample: int) -> tuple[str, bool]:
        """See `node.contributing.asking.Source`. Raises RemoteError where another try would fail alike."""
        pause = _PAUSE_SECONDS
        for left in reversed(range(TRIES)):
            try:
                with trio.fail_after(self._remote.seconds):
                    return self._read(await self._post(task))
            except trio.TooSlowError as error:
                problem: Exception = error
                why, after = f"no answer within {self._remote.seconds:g} s (--timeout)", 0.0
            except httpx.RequestError as error:
                problem, why, after = error, str(error) or type(error).__name__, 0.0
            except _Again as error:
                problem, why, after = error, str(error), error.after
            if left == 0:
                raise NoAnswer(f"{self._where}: {self._shown(why)}") from problem
            await trio.sleep(min(max(pause, after), _LONGEST_PAUSE))
            pause *= 2
        raise AssertionError("the last try either answers or raises")

    async def _post(self, task: Task) -> bytes:
        """The body of the reply. Raises _Again or RemoteError for another status than success, NoAnswer."""
        remote = self._remote
        asked: dict[str, Any] = {
            "model": remote.model,
            "messages": _messages(remote.prompt, task),
            "max_tokens": remote.max_tokens,
            "temperature": remote.temperature,
            "top_p": remote.top_p,
        }
        async with self._client.stream("POST", self._url, json=asked) as response:
            body = await self._body(response)
        status = response.status_code
        if response.is_success:
            return body
        why = f"status {status}: {self._shown(_message(body))}"
        if status in _TEMPORARY or status >= 500:
            raise _Again(why, _seconds(response.headers.get("retry-after", "")))
        if response.is_redirect:
            raise RemoteError(f"{self._where} moved: {why}. The key is not sent on: give the new URL to --openai")
        advice = _ADVICE.get(status, "the server refuses such requests").format(variable=remote.variable)
        raise RemoteError(f"{self._where} refuses: {why}. {advice[0].upper()}{advice[1:]}")

    async def _body(self, response: httpx.Response) -> bytes:
        body = bytearray()
        # As it came: what is compressed all the same could be of any size, and is no JSON.
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > _ANSWER_BYTES + 6 * self._remote.longest:
                raise NoAnswer(f"{self._where}: a reply of more than {len(body) >> 20} MiB")
        return bytes(body)

    def _read(self, body: bytes) -> tuple[str, bool]:
        """Raises NoAnswer if the reply is none."""
        try:
            reply = _Reply.model_validate(from_json(body))
        except (ValueError, ValidationError) as error:
            raise NoAnswer(f"{self._where}: the reply is no chat completion") from error
        choice = reply.choices[0]
        return choice.message.content or "", choice.finish_reason != "length"

    def _shown(self, text: str) -> str:
        """What the server said, which may repeat the key."""
        return clean(text.replace(self._key, "********") if self._key else text)[:_QUOTED]


def _messages(settings: PromptSettings, task: Task) -> list[dict[str, str]]:
    """The task as this node would show it to a policy of its own."""
    messages = [{"role": "system", "content": settings.system}] if settings.system else []
    if settings.shots and task.example is not None:
        messages.append({"role": "user", "content": task.example.prompt})
        messages.append({"role": "assistant", "content": task.example.answer})
    return [*messages, {"role": "user", "content": task.prompt}]


def _message(body: bytes) -> str:
    """What is wrong, in the server's words."""
    try:
        value = from_json(body)
    except ValueError:
        return body[:_QUOTED].decode(errors="replace")
    error = value.get("error", value) if isinstance(value, dict) else value
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _seconds(header: str) -> float:
    """`Retry-After` as far as it is a number."""
    return min(float(header), _LONGEST_PAUSE) if header.isdecimal() and len(header) < 9 else 0.0
