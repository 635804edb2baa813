"""Requests for answers wait here for their turn with the learner, one after the other."""

import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

import trio

from node import logs
from node.api.asked import ChatRequest
from node.api.current import Absent, CurrentLearner
from node.api.errors import ApiError
from node.background import background
from node.errors import NodeError
from node.learner import LearnerDied, PromptRefused
from node.text import clean
from rl.rollouts import ChatAnswer

Event = str | ChatAnswer | ApiError
"""A piece of text (of a stream), a whole answer, or why there is none. After an ApiError nothing more comes."""


class Job:
    """One request. Whoever asked reads `next` until all answers are there, and leaves with `close`."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        # Never full: its length is bounded by the tokens of the answers, and the learner waits for no reader.
        self._send, self._receive = trio.open_memory_channel[Event](math.inf)
        self.gone = False

    async def next(self) -> Event:
        """The next event."""
        return await self._receive.receive()

    def tell(self, event: Event) -> None:
        """Add an event, unless nobody reads any more."""
        with suppress(trio.BrokenResourceError):
            self._send.send_nowait(event)

    def close(self) -> None:
        """Nobody reads any more: what has not begun need not be done."""
        self.gone = True
        self._receive.close()


class Answers:
    """The queue and the one who works through it. Get it from `open_answers`."""

    def __init__(self, current: CurrentLearner, longest: int, places: int) -> None:
        self.current = current
        self._longest = longest
        self._places = places
        self._waiting: deque[Job] = deque()
        self._news = trio.Event()

    def ask(self, request: ChatRequest) -> Job:
        """Put a request into the queue. Raises ApiError if there is no place."""
        # Those who have left need no place.
        self._waiting = deque(job for job in self._waiting if not job.gone)
        if len(self._waiting) >= self._places:
            raise ApiError(
                503, f"{self._places} requests are waiting already: [api] waiting", code="overloaded", again=True
            )
        job = Job(request)
        self._waiting.append(job)
        self._news.set()
        return job

    async def work(self) -> NoReturn:
        """Answer one request after the other."""
        while True:
            while not self._waiting:
                self._news = trio.Event()
                await self._news.wait()
            await self._answer(self._waiting.popleft())

    async def _answer(self, job: Job) -> None:
        request = job.request
        say: Callable[[str], None] | None = job.tell if request.stream else None
        try:
            for seed in request.seeds():
                if job.gone:
                    return
                # Runs to its end even if the client leaves: a request that is cut short stops the learner's rounds.
                answer = await self.current.chat(request.turns(), request.sampling(self._longest), seed, say)
                if not answer.tokens:
                    raise ApiError(
                        400,
                        f"the messages take {answer.prompt_tokens} tokens, and the model has room for {answer.context}"
                        " with the answer: send fewer or shorter ones",
                        code="context_length_exceeded",
                        param="messages",
                    )
                job.tell(answer)
        # No request may take the node along, whatever it is that fails: the rounds see for themselves what has become
        # of the learner.
        except Exception as error:  # noqa: BLE001
            job.tell(_error_of(error))


def _error_of(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Absent):
        return ApiError(503, str(error), code="not_ready", again=True)
    if isinstance(error, PromptRefused):
        return ApiError(400, str(error), code="invalid_value", param="messages")
    if isinstance(error, LearnerDied):
        # What it said last is in the node's log.
        return ApiError(500, str(error).splitlines()[0], code="learner_died")
    if isinstance(error, (NodeError, OSError)):
        return ApiError(500, str(error).splitlines()[0], code="learner_failed")
    logs.get().error("a fault while answering a request", exc_info=error)
    return ApiError(500, f"a fault of the node: {clean(type(error).__name__)}, see its log", code="internal_error")


@asynccontextmanager
async def open_answers(current: CurrentLearner, longest: int, places: int) -> AsyncIterator[Answers]:
    """Answers of at most `longest` tokens, for at most `places` requests that wait at a time."""
    answers = Answers(current, longest, places)
    async with background() as nursery:
        nursery.start_soon(answers.work)
        yield answers
