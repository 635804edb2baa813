"""The OpenAI-compatible endpoint over real HTTP, with a learner that says what it is told to say."""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio
from pydantic import ValidationError

from node.api.current import CurrentLearner
from node.api.openai import MAX_BODY
from node.api.server import PortError, open_api
from node.api.settings import ApiSettings
from node.learner import LearnerDied, LearnerFailed, PromptRefused
from rl.rollouts import ChatAnswer, Sampling

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"


class Learner:
    """Says `pieces`, notes what it was asked, and does so only while `open` is set."""

    def __init__(self, *pieces: str, finished: bool = True, error: Exception | None = None) -> None:
        self.description: dict[str, Any] = {"public_name": "tiny", "model": "tiny"}
        self.pieces, self.finished, self.error = pieces or ("Hi", " there"), finished, error
        self.asked: list[tuple[list[dict[str, str]], Sampling, int]] = []
        self.done = 0
        self.context = 100
        self.open = trio.Event()
        self.open.set()

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling: Sampling,
        seed: int,
        on_text: Callable[[str], None] | None = None,
    ) -> ChatAnswer:
        self.asked.append(([dict(message) for message in messages], sampling, seed))
        prompt = sum(len(message["content"]) for message in messages)
        if prompt >= self.context:
            return ChatAnswer("", False, 0, prompt, self.context, 7)
        for number, piece in enumerate(self.pieces):
            if on_text is not None:
                on_text(piece)
            await trio.sleep(0.01)
            if number == 0:
                await self.open.wait()
        if self.error is not None:
            raise self.error
        self.done += 1
        # A last character that was not completed is in the text alone.
        return ChatAnswer("".join(self.pieces) + "\ufffd", self.finished, len(self.pieces) + 1, prompt, 100, 7)


@asynccontextmanager
async def serving(learner: Learner | None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    current = CurrentLearner()
    with trio.fail_after(60):
        async with (
            open_api(ApiSettings(openai=True, port=0, **settings), current, lambda level, text: None) as address,
            httpx.AsyncClient(base_url=address, timeout=30, trust_env=False, verify=False) as client,
        ):
            if learner is None:
                yield client
                return
            async with current.lent(learner):
                yield client


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_an_answer_says_what_openais_says() -> None:
    learner = Learner()
    async with serving(learner) as client:
        models = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]
        assert (await client.get("/v1/models/tiny")).json() == models["data"][0]
        answer = (await client.post(CHAT, json={**HELLO, "model": "tiny"})).json()
        assert answer["object"] == "chat.completion"
        assert answer["id"].startswith("chatcmpl-")
        assert answer["model"] == "tiny"
        assert answer["system_fingerprint"] == "step-7", "which policy it was"
        assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        [choice] = answer["choices"]
        assert choice["message"] == {"role": "assistant", "content": "Hi there\ufffd", "refusal": None}
        assert choice["finish_reason"] == "stop"
        [(messages, sampling, _)] = learner.asked
        assert messages == HELLO["messages"], "nothing is added"
        assert sampling == Sampling(1, 1024, 1.0, 1.0), "as the policy is trained"
        learner.finished = False
        assert (await client.post(CHAT, json=HELLO)).json()["choices"][0]["finish_reason"] == "length"


async def test_how_it_is_sampled_is_the_clients_choice_within_bounds() -> None:
    learner = Learner()
    async with serving(learner, max_tokens=50) as client:
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts, "name": "ann"}]
        more = {"temperature": 0.5, "top_p": 0.9, "max_completion_tokens": 4000, "seed": -3, "n": 3}
        ignored = {"user": "ann", "store": True, "metadata": {"a": "b"}, "logprobs": False, "tools": None,
                   "logit_bias": {}, "response_format": {"type": "text"}, "presence_penalty": 0.0}  # fmt: skip
        answer = (await client.post(CHAT, json={"messages": messages, **more, **ignored})).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert answer["usage"] == {"prompt_tokens": 12, "completion_tokens": 9, "total_tokens": 21}
        shown, sampling, _ = learner.asked[0]
        assert shown == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
        assert sampling == Sampling(1, 50, 0.5, 0.9)
        seeds = [seed for _, _, seed in learner.asked]
        assert len(set(seeds)) == 3
        await client.post(CHAT, json={**HELLO, "seed": -3, "n": 3})
        assert [seed for _, _, seed in learner.asked[3:]] == seeds, "the same seed, the same answers"
        await client.post(CHAT, json={**HELLO, "temperature": 1e-30, "max_tokens": 3})
        assert learner.asked[-1][1] == Sampling(1, 3, 0.0, 1.0)


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"logprobs": True}, "logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"top_k": 5}, "top_k"),
    ({"n": 9}, "n"),
    ({"n": 2, "stream": True}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 1e400}, None),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"seed": 10**400}, "seed"),
    ({"stop": [""]}, "stop.0"),
    ({"stream": "yes"}, "stream"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "user", "content": "x" * 200}]}, "messages"),
    ({"messages": "hello"}, "messages"),
]


async def test_what_cannot_be_done_is_refused_by_name() -> None:
    async with serving(Learner()) as client:
        for change, param in REFUSED:
            response = await client.post(CHAT, content=json.dumps({**HELLO, **change}))
            assert response.status_code == 400, change
            error = error_of(response)
            assert error["param"] == param
            assert error["type"] == "invalid_request_error"
            assert (await client.post(CHAT, json=HELLO)).status_code == 200, "and the next one is answered"


async def test_a_prompt_without_room_for_an_answer_has_its_code() -> None:
    async with serving(Learner()) as client:
        for stream in (False, True):
            long = {"messages": [{"role": "user", "content": "x" * 100}], "stream": stream}
            response = await client.post(CHAT, json=long)
            assert response.status_code == 400
            assert error_of(response)["code"] == "context_length_exceeded"


async def test_a_body_that_is_no_request_is_refused() -> None:
    async with serving(Learner()) as client:
        for body in (b"", b"{", b"[]", b"[" * 100_000, b"\xff", b'{"messages": "\\ud800"}', b"9" * 5000):
            response = await client.post(CHAT, content=body)
            assert response.status_code == 400, body[:20]
            error_of(response)


async def test_sizes_paths_methods_and_models_are_checked() -> None:
    async with serving(Learner()) as client:
        assert (await client.post(CHAT, content=b"x" * (MAX_BODY + 1))).status_code == 413
        assert error_of(await client.get("/v1/embeddings"))["type"] == "invalid_request_error"
        assert (await client.get(CHAT)).status_code == 405
        for response in (await client.post(CHAT, json={**HELLO, "model": "gpt"}), await client.get("/v1/models/gpt")):
            assert response.status_code == 404
            assert error_of(response)["code"] == "model_not_found"
            assert "tiny" in error_of(response)["message"]


async def test_a_stream_comes_in_pieces_while_the_learner_writes() -> None:
    learner = Learner("Hi", " there", finished=False)
    learner.open = trio.Event()
    async with serving(learner) as client:
        request = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", CHAT, json=request) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            text = ""
            async for piece in response.aiter_text():
                text += piece
                if '"Hi"' in text and not learner.open.is_set():
                    assert not learner.done, "the first piece comes before the last is known"
                    learner.open.set()
        *chunks, last, done = events(text)
        assert done == "[DONE]"
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas == [{"role": "assistant", "content": ""}, {"content": "Hi"}, {"content": " there"},
                          {"content": "\ufffd"}, {}]  # fmt: skip
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


@pytest.mark.parametrize("pieces", [("one STOP two",), ("one S", "TO", "P two"), ("one ", "STOP", " two")])
async def test_text_ends_at_a_stop_sequence_however_it_comes(pieces: tuple[str, ...]) -> None:
    async with serving(Learner(*pieces, finished=False)) as client:
        request = {**HELLO, "stop": ["STOP", "two"]}
        [choice] = (await client.post(CHAT, json=request)).json()["choices"]
        assert choice["message"]["content"] == "one "
        assert choice["finish_reason"] == "stop"
        *chunks, _ = events((await client.post(CHAT, json={**request, "stream": True})).text)
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "one "
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        # What only looks like the beginning of one is shown.
        *chunks, _ = events((await client.post(CHAT, json={**HELLO, "stop": " twofold", "stream": True})).text)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "one STOP two\ufffd"


HEADERS: list[tuple[dict[str, str], int]] = [
    ({}, 200),
    ({"Host": "localhost:9000"}, 200),
    ({"Host": "[::1]:80"}, 200),
    ({"Host": "localhost:80", "Origin": "http://localhost:80", "Sec-Fetch-Site": "same-origin"}, 200),
    ({"Host": "attacker.example"}, 403),
    ({"Host": "localhost.attacker.example"}, 403),
    ({"Host": "127.0.0.1.attacker.example:80"}, 403),
    ({"Host": "10.0.0.1"}, 403),
    ({"Origin": "http://attacker.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Host": "localhost:80", "Origin": "http://localhost:81"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
]


async def test_pages_of_other_sites_get_nothing() -> None:
    learner = Learner()
    async with serving(learner) as client:
        for headers, status in HEADERS:
            learner.asked.clear()
            assert (await client.get("/v1/models", headers=headers)).status_code == status, headers
            response = await client.post(CHAT, json=HELLO, headers=headers)
            assert response.status_code == status, headers
            assert len(learner.asked) == (status == 200)


async def test_without_a_learner_the_client_is_told_to_come_back() -> None:
    async with serving(None) as client:
        for response in (await client.get("/v1/models"), await client.post(CHAT, json=HELLO)):
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) > 0
            assert error_of(response)["code"] == "not_ready"


async def test_a_full_queue_is_told_and_those_who_leave_make_room() -> None:
    learner = Learner()
    learner.open = trio.Event()
    answered: list[int] = []
    second = trio.CancelScope()

    async with serving(learner, waiting=1) as client, trio.open_nursery() as nursery:

        async def ask(scope: trio.CancelScope) -> None:
            with scope:
                # Whoever asks only shortly may have the place just now.
                while (status := (await client.post(CHAT, json=HELLO)).status_code) == 503:
                    await trio.sleep(0.005)
                answered.append(status)

        async def ask_shortly() -> httpx.Response | None:
            with trio.move_on_after(0.5):
                return await client.post(CHAT, json=HELLO)
            return None

        nursery.start_soon(ask, trio.CancelScope())
        while not learner.asked:
            await trio.sleep(0.01)
        nursery.start_soon(ask, second)
        while (response := await ask_shortly()) is None:
            await trio.sleep(0.1)
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert error_of(response)["code"] == "overloaded"
        second.cancel()
        while await ask_shortly() is not None:
            await trio.sleep(0.01)
        assert len(learner.asked) == 1, "one at a time"
        learner.open.set()
    assert answered == [200]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_nothing(stream: bool) -> None:
    learner = Learner()
    learner.open = trio.Event()
    async with serving(learner) as client:
        with trio.move_on_after(0.5):
            async with client.stream(
                "POST", CHAT, json={**HELLO, "stream": stream, "n": 1 if stream else 8}
            ) as response:
                await response.aread()
        assert len(learner.asked) == 1
        learner.open.set()
        assert (await client.post(CHAT, json=HELLO)).status_code == 200
        assert 2 <= learner.done < 8, "what was begun was finished, and not all the rest"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (LearnerDied("the learner process was ended by SIGKILL\n  its last words"), 500, "SIGKILL"),
        (LearnerFailed("the engine does not sample from the policy"), 500, "the engine"),
        (PromptRefused("the model's chat template refuses this"), 400, "refuses"),
        (RuntimeError("secret"), 500, "RuntimeError"),
    ],
)
async def test_what_fails_is_told_and_the_next_request_is_answered(error: Exception, status: int, said: str) -> None:
    learner = Learner(error=error)
    async with serving(learner) as client:
        response = await client.post(CHAT, json=HELLO)
        assert response.status_code == status
        assert said in error_of(response)["message"]
        assert "words" not in response.text
        assert "secret" not in response.text
        assert (response.headers.get("x-should-retry") == "false") == (status == 500)
        *_, last = events((await client.post(CHAT, json={**HELLO, "stream": True})).text)
        assert said in last["error"]["message"], "in the middle of a stream too"
        learner.error = None
        assert (await client.post(CHAT, json=HELLO)).status_code == 200


async def test_a_learner_that_is_taken_away_leaves_an_error_and_no_work() -> None:
    learner, current = Learner(), CurrentLearner()
    learner.open = trio.Event()
    responses: list[httpx.Response] = []
    with trio.fail_after(60):
        async with (
            open_api(ApiSettings(openai=True, port=0), current, lambda level, text: None) as address,
            httpx.AsyncClient(base_url=address, timeout=30, trust_env=False, verify=False) as client,
            trio.open_nursery() as nursery,
        ):

            async def ask() -> None:
                responses.append(await client.post(CHAT, json=HELLO))

            async with current.lent(learner):
                nursery.start_soon(ask)
                nursery.start_soon(ask)
                while not learner.asked:
                    await trio.sleep(0.01)
            assert current.description is None
    assert [response.status_code for response in responses] == [503, 503]
    assert [error_of(response)["code"] for response in responses] == ["not_ready"] * 2
    assert not learner.done


async def test_nonsense_on_the_socket_leaves_the_server_as_it_was() -> None:
    async with serving(Learner()) as client:
        port = client.base_url.port
        assert port is not None
        for bytes_ in (
            b"\x16\x03\x01\x02\x00",
            b"GET / HTTP/9\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: !!\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n{",
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"GET /" + b"x" * 100_000,
        ):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            async with stream:
                await stream.send_all(bytes_)
                with trio.move_on_after(0.2):
                    await stream.receive_some()
            assert (await client.get("/v1/models")).status_code == 200


async def test_two_nodes_at_one_port_are_told_what_to_change() -> None:
    async with serving(Learner()) as client:
        settings = ApiSettings(openai=True, port=client.base_url.port or 0)
        with pytest.raises(PortError, match=r"\[api\]\s*port"):
            async with open_api(settings, CurrentLearner(), lambda level, text: None):
                pass


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1:80", "*", ""])
def test_what_is_no_address_is_refused(host: str) -> None:
    with pytest.raises(ValidationError, match=r"127\.0\.0\.1"):
        ApiSettings(host=host)


@pytest.mark.parametrize(("host", "address"), [("localhost", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("::1", "::1")])
def test_loopback_addresses_may(host: str, address: str) -> None:
    assert ApiSettings(host=host).host == address
