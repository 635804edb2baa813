"""The endpoints below /api/v1, and /metrics."""

import os
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version as distribution_version
from typing import TypeVar

import trio
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from node.api import models, prometheus, stored
from node.api.contributing import Contributions
from node.api.control import Control
from node.api.errors import ApiError
from node.api.events import EventStream
from node.api.feed import Feed
from node.api.openapi import OPERATIONS, document
from node.api.resources import Meter
from node.config import Config
from node.contributing.opening import Place
from node.datadir import DataDir
from node.masking import masked

_THREADS = 2
"""For reading files on behalf of clients; those of the node's own work are others."""

Handler = Callable[[Request], Awaitable[Response]]
Query = TypeVar("Query", bound=BaseModel)
Read = TypeVar("Read")


@dataclass(frozen=True)
class Seen:
    """What clients get to see of a node, and what they may ask of it."""

    config: Config
    data: DataDir
    node_id: str
    feed: Feed
    control: Control
    place: Place = field(default_factory=Place)


class V1:
    """The handlers, by the names of their operations."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._version = distribution_version("swarmnode")
        self.limiter = trio.CapacityLimiter(_THREADS)
        self._meter = Meter(seen.data.path, self.limiter)

    def routes(self) -> list[Route]:
        """One for each operation."""
        handlers: Mapping[str, Handler] = {
            "status": self._status,
            "rounds": self._rounds,
            "events": self._events,
            "peers": self._peers,
            "rollouts": self._rollouts,
            "firsts": self._firsts,
            "evaluations": self._evaluations,
            "resources": self._resources,
            "log": self._log,
            "config": self._config,
            "openapi": self._openapi,
            "metrics": self._metrics,
            "pause": self._pause,
            "resume": self._resume,
            "checkpoint": self._checkpoint,
            "stop": self._stop,
            **Contributions(self._seen.place).handlers,
        }
        return [Route(o.path, handlers[o.name], methods=[o.method]) for o in OPERATIONS]

    def _state(self) -> models.State:
        control = self._seen.control
        if control.stopping:
            return "stopping"
        if control.paused:
            return "paused" if control.resting else "pausing"
        if self._seen.feed.info is None:
            return "starting"
        config = self._seen.config
        return "relaying" if config.node.relay else "training" if config.training.train else "sampling"

    async def _status(self, request: Request) -> Response:
        seen, feed = self._seen, self._seen.feed
        info, history = feed.info, feed.history
        return _said(
            models.Status(
                version=self._version,
                node_id=seen.node_id,
                name=seen.config.node.name,
                model=info.model if info else None,
                device=info.device if info else None,
                engine=info.engine if info else None,
                pid=os.getpid(),
                data_dir=str(seen.data.path),
                silo=seen.config.sharing.silo,
                state=self._state(),
                phase=feed.phase_name,
                phase_seconds=round(feed.phase_seconds, 3),
                progress=feed.progress_now,
                round=seen.control.done,
                goal=info.rounds if info else None,
                saved_round=seen.control.saved,
                first_round=history.first,
                reward_recent=history.reward_recent,
                peers=feed.snapshot.connected if feed.snapshot else 0,
                time=time.time(),
            )
        )

    async def _rounds(self, request: Request) -> Response:
        query = _query(models.RoundsQuery, request)
        return _json(f'{{"rounds":{self._seen.feed.history.page(query.first, query.limit)}}}')

    async def _events(self, request: Request) -> Response:
        return EventStream(self._seen.feed)

    async def _peers(self, request: Request) -> Response:
        return _said(models.Peers(swarm=self._seen.feed.snapshot))

    async def _rollouts(self, request: Request) -> Response:
        query = _query(models.RolloutsQuery, request)
        path = self._seen.data.pool_path

        def read() -> str:
            return stored.rollouts(path, query).model_dump_json()

        try:
            return _json(await self._in_thread(read))
        except sqlite3.Error as error:
            raise ApiError(503, f"the pool cannot be read just now: {error}", code="busy", again=True) from error

    async def _firsts(self, request: Request) -> Response:
        return _said(self._seen.feed.firsts.all())

    async def _evaluations(self, request: Request) -> Response:
        return _said(await self._read_evaluations())

    async def _resources(self, request: Request) -> Response:
        return _said(await self._meter.read())

    async def _log(self, request: Request) -> Response:
        return _said(models.Log(lines=list(self._seen.feed.lines)))

    async def _config(self, request: Request) -> Response:
        values = masked((), self._seen.config.model_dump(mode="json"))
        return _said(models.Settings(config=values))

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(document(self._version))

    async def _metrics(self, request: Request) -> Response:
        seen = self._seen
        evaluations = (await self._read_evaluations()).evaluations
        measured = evaluations[-1] if evaluations else None
        text = prometheus.exposition(self._version, seen.feed, seen.control, await self._meter.read(), measured)
        return Response(text, headers={"content-type": prometheus.TYPE, "cache-control": "no-store"})

    async def _pause(self, request: Request) -> Response:
        return self._ask(self._seen.control.pause, "paused over HTTP: no further round begins")

    async def _resume(self, request: Request) -> Response:
        return self._ask(self._seen.control.resume, "resumed over HTTP")

    async def _checkpoint(self, request: Request) -> Response:
        return self._ask(self._seen.control.save, "asked over HTTP for a checkpoint")

    async def _stop(self, request: Request) -> Response:
        said = "stopping, as asked over HTTP: the last finished round is saved first"
        return self._ask(self._seen.control.stop, said, of_rounds=False)

    def _ask(self, action: Callable[[], None], said: str, *, of_rounds: bool = True) -> Response:
        seen = self._seen
        if of_rounds and seen.config.node.relay:
            raise ApiError(409, "this node is a relay: it has no rounds", code="relay")
        action()
        seen.feed.message("info", said)
        state = self._state()
        seen.feed.changed(state)
        return _said(models.Done(state=state, round=seen.control.done, saved_round=seen.control.saved), 202)

    async def _read_evaluations(self) -> models.Evaluations:
        path = self._seen.data.evaluations_path
        return await self._in_thread(lambda: stored.evaluations(path))

    async def _in_thread(self, read: Callable[[], Read]) -> Read:
        return await trio.to_thread.run_sync(read, limiter=self.limiter)


def _query(model: type[Query], request: Request) -> Query:
    """Raises ApiError, which names the parameter at fault."""
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])[:64]
        raise ApiError(400, f"{param}: {first['msg']}", code="invalid_value", param=param) from error


def _said(answer: BaseModel, status: int = 200) -> Response:
    return _json(answer.model_dump_json(), status)


def _json(text: str, status: int = 200) -> Response:
    return Response(text, status, {"content-type": "application/json", "cache-control": "no-store"})
