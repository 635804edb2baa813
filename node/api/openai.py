"""Chat completions and models, as OpenAI's clients speak it. Answers are of the policy as it is at that moment."""

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from node.api.answers import Answers, Event, Job
from node.api.asked import parse
from node.api.body import read_body
from node.api.current import Absent
from node.api.errors import ApiError
from rl.nurseries import unwrapped
from rl.rollouts import ChatAnswer

MAX_BODY = 2**20
"""Bytes in a request; far more text than a model of this size reads."""


def routes(answers: Answers) -> list[Route]:
    """Those below /v1."""
    born = int(time.time())

    def models() -> list[dict[str, Any]]:
        return [{"id": _name(answers), "object": "model", "created": born, "owned_by": "swarmnode"}]

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": models()})

    async def get_model(request: Request) -> Response:
        _check_model(answers, request.path_params["model"])
        return JSONResponse(models()[0])

    async def complete(request: Request) -> Response:
        try:
            asked = parse(await read_body(request, MAX_BODY))
        except ClientDisconnect:
            return Response(status_code=400)
        name = _check_model(answers, asked.model)
        return _Completion(answers.ask(asked), name)

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", get_model, methods=["GET"]),
        Route("/v1/chat/completions", complete, methods=["POST"]),
    ]


def _name(answers: Answers) -> str:
    """The model's name. Raises ApiError while there is no learner."""
    about = answers.current.description
    if about is None:
        raise ApiError(503, str(Absent()), code="not_ready", again=True)
    return str(about["public_name"])


def _check_model(answers: Answers, asked: str | None) -> str:
    name = _name(answers)
    if asked not in (None, name):
        raise ApiError(
            404, f"there is no model {asked!r} here, but {name!r} alone", code="model_not_found", param="model"
        )
    return name


class StopText:
    """Cuts text that comes in pieces at the first of some sequences."""

    def __init__(self, sequences: Sequence[str]) -> None:
        self._sequences = sequences
        self._held = ""
        self.found = False

    def feed(self, piece: str) -> str:
        """What of all text until now may be shown and has not been: no part of a sequence, nor what may become one."""
        if self.found:
            return ""
        text = self._held + piece
        found = [at for sequence in self._sequences if (at := text.find(sequence)) >= 0]
        self.found = bool(found)
        end = min(found) if found else len(text) - self._begun(text)
        self._held = "" if found else text[end:]
        return text[:end]

    def rest(self) -> str:
        """What was held back, at the end of the text."""
        rest, self._held = self._held, ""
        return rest

    def _begun(self, text: str) -> int:
        """Characters at the end of `text` that begin one of the sequences."""
        lengths = [n for s in self._sequences for n in range(1, len(s)) if text.endswith(s[:n])]
        return max(lengths, default=0)


class _Completion(Response):
    """The response to one request, whole or as a stream of server-sent events."""

    def __init__(self, job: Job, model: str) -> None:
        super().__init__()
        self._job = job
        self._about = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. Ends without an answer when the client leaves."""
        respond = self._stream if self._job.request.stream else self._whole
        try:
            with unwrapped():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
                    await respond(scope, receive, send)
                    nursery.cancel_scope.cancel()
        finally:
            self._job.close()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._job.request
        answers: list[ChatAnswer] = []
        while len(answers) < request.n:
            event = await self._job.next()
            if isinstance(event, ApiError):
                await event.response()(scope, receive, send)
                return
            if isinstance(event, ChatAnswer):
                answers.append(event)
        choices: list[dict[str, Any]] = []
        for index, answer in enumerate(answers):
            cut = StopText(request.stop)
            text = cut.feed(answer.text) + cut.rest()
            message = {"role": "assistant", "content": text, "refusal": None}
            reason = _reason(answer, cut)
            choices.append({"index": index, "message": message, "logprobs": None, "finish_reason": reason})
        body = {
            "object": "chat.completion",
            **self._about,
            "system_fingerprint": _fingerprint(answers[-1]),
            "choices": choices,
            "usage": _usage(answers),
        }
        await JSONResponse(body)(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        # As long as there is no text, an error can still be a status of its own.
        event = await self._job.next()
        if isinstance(event, ApiError):
            await event.response()(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def say(line: str) -> None:
            await send({"type": "http.response.body", "body": f"data: {line}\n\n".encode(), "more_body": True})

        failed = await self._chunks(event, say)
        await say(json.dumps(failed.body) if failed is not None else "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self, event: Event, say: Callable[[str], Awaitable[None]]) -> ApiError | None:
        """Say the answer that begins with `event`. Returns what went wrong in the middle of it."""
        request, cut = self._job.request, StopText(self._job.request.stop)
        fields: dict[str, Any] = {"object": "chat.completion.chunk", **self._about, "system_fingerprint": None}
        if request.stream_options.include_usage:
            fields["usage"] = None

        async def chunk(delta: dict[str, str], reason: str | None = None) -> None:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            await say(json.dumps({**fields, "choices": [choice]}))

        await chunk({"role": "assistant", "content": ""})
        said = 0
        while isinstance(event, str):
            said += len(event)
            if text := cut.feed(event):
                await chunk({"content": text})
            if cut.found and not request.stream_options.include_usage:
                await chunk({}, "stop")
                return None
            event = await self._job.next()
        if isinstance(event, ApiError):
            return event
        # A character that was never completed has not been said.
        if text := cut.feed(event.text[said:]) + cut.rest():
            await chunk({"content": text})
        fields["system_fingerprint"] = _fingerprint(event)
        await chunk({}, _reason(event, cut))
        if request.stream_options.include_usage:
            await say(json.dumps({**fields, "choices": [], "usage": _usage([event])}))
        return None


async def _cancel_when_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _reason(answer: ChatAnswer, cut: StopText) -> str:
    return "stop" if answer.finished or cut.found else "length"


def _fingerprint(answer: ChatAnswer) -> str:
    """Which policy answered."""
    return f"step-{answer.policy_step}"


def _usage(answers: Sequence[ChatAnswer]) -> dict[str, int]:
    """Tokens; the prompt counts once, as OpenAI counts it. What a stop sequence cut off was sampled and counts."""
    prompt, said = answers[0].prompt_tokens, sum(answer.tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
