"""Tasks for people: what the page `/contribute` asks, and any program that likes."""

import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import trio
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from node.api import models
from node.api.body import read_body
from node.api.errors import ApiError
from node.contributing.answers import NoAnswer
from node.contributing.desk import Desk, Question
from node.contributing.opening import Place
from verifiers.base import VerifierError
from verifiers.sandbox import RIGHT

MAX_OPEN = 16
"""Tasks handed out and not done with; the one that was longest left alone is forgotten for a further one."""

_AT_ONCE = 1
"""Requests that have something made or scored at a time: the sandbox is there for the node's own rounds first."""

_BODY = 4096
"""Bytes of a body beside the answer, of which each character may take six."""

Asked = TypeVar("Asked", bound=BaseModel)
Done = TypeVar("Done")


class Contributions:
    """The handlers. They answer while there is a desk."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._open: OrderedDict[str, Question] = OrderedDict()
        self._limit = trio.CapacityLimiter(_AT_ONCE)

    @property
    def handlers(self) -> Mapping[str, Callable[[Request], Awaitable[Response]]]:
        """By the names of their operations."""
        return {
            "contribute_task": self._task,
            "contribute_answer": self._answer,
            "contribute_next": self._next,
        }

    async def _task(self, request: Request) -> Response:
        desk = self._at_desk()
        if desk.full:
            raise ApiError(503, "answers wait for another node to be sent to", code="busy", again=True)
        question = await self._within(desk.draw)
        key = secrets.token_urlsafe(12)
        self._open[key] = question
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        task = question.task
        example = None
        if task.example is not None:
            example = models.SolvedTask(prompt=task.example.prompt, answer=task.example.answer)
        return _said(models.OpenTask(id=key, kind=task.kind, prompt=task.prompt, example=example, tries=desk.samples))

    async def _answer(self, request: Request) -> Response:
        desk = self._at_desk()
        given = await _body(request, models.Answer, _BODY + 6 * desk.longest)
        question = self._question(given.id)
        try:
            reward = await self._within(lambda: desk.answer(question, given.answer))
        except NoAnswer as error:
            raise ApiError(400, str(error), code="invalid_value", param="answer") from error
        right = reward >= RIGHT
        tries = desk.samples - len(question.answers)
        over = right or tries <= 0
        shared = await self._finish(desk, given.id, question) if over else False
        return _said(
            models.Judged(reward=reward, right=right, tries=tries, over=over, shared=shared, waiting=desk.waiting)
        )

    async def _next(self, request: Request) -> Response:
        desk = self._at_desk()
        given = await _body(request, models.Left, _BODY)
        shared = await self._finish(desk, given.id, self._question(given.id))
        return _said(models.Gone(shared=shared, waiting=desk.waiting))

    async def _finish(self, desk: Desk, key: str, question: Question) -> bool:
        self._open.pop(key, None)
        return await self._within(lambda: desk.finish(question))

    def _at_desk(self) -> Desk:
        desk = self._place.desk
        if desk is None:
            raise ApiError(
                503,
                "this node takes no answers: it trains alone, is only just starting, or its log says why",
                code="not_ready",
                again=True,
            )
        return desk

    def _question(self, key: str) -> Question:
        question = self._open.get(key)
        if question is None:
            raise ApiError(404, "this task is done with, or too many others came after it", code="gone", param="id")
        self._open.move_to_end(key)
        return question

    async def _within(self, work: Callable[[], Awaitable[Done]]) -> Done:
        """Do it, unless the node ends meanwhile."""
        try:
            with self._place.over.interruptible():
                async with self._limit:
                    return await work()
        except VerifierError as error:
            raise ApiError(503, f"the verifiers failed: {error}", code="verifier_failed", again=True) from error
        raise ApiError(503, "the node is stopping", code="not_ready", again=True)


async def _body(request: Request, model: type[Asked], most: int) -> Asked:
    """Raises ApiError, which names the field at fault."""
    try:
        return model.model_validate(from_json(await read_body(request, most), allow_inf_nan=False))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])[:64]
        raise ApiError(400, f"{param}: {first['msg']}", code="invalid_value", param=param) from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error


def _said(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), headers={"content-type": "application/json", "cache-control": "no-store"})
