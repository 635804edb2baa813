"""Requests to `/api/v1`: targets with their queries, and bodies of those that answer tasks."""

import json
import unicodedata
from collections.abc import Mapping
from typing import cast

import trio

from node.api.app import make_app
from node.api.contact import CLAIM
from node.api.control import Control
from node.api.feed import Feed
from node.api.guard import Rules
from node.api.openapi import OPERATIONS
from node.api.v1 import V1, Seen
from node.config import Config, NodeSettings
from node.contributing.desk import Desk
from node.contributing.kept import Kept
from node.datadir import DataDir
from node.disk import Disk
from node.stop import Stop
from rl.pool import SqlitePool
from tests.fuzz.asking import answered
from tests.fuzz.scratch import directory
from tests.node.records import record, scored_group
from tests.node.test_api_v1 import ME, Quiet, info, snapshot
from tests.p2p.fakes import FakePool, FakeTasks, numbers
from verifiers.base import Task, TaskRef

HEADERS = [(b"host", b"localhost"), (CLAIM, b"1")]
LONGEST_ANSWER = 50
KEY = b"KEY"
"""Stands for the id of a task that was handed out."""

(PLACE,) = numbers()(1)
POOL = FakePool()


class _Stream:
    cursor: Mapping[str, int] = {}

    async def draw(self, count: int, /) -> list[Task]:
        return [await FakeTasks().make(TaskRef("fake", "1", "{}", 1, PLACE)) for _ in range(count)]


class _Nowhere:
    """Keeps nothing, so that there is always room."""

    def add(self, *_: object) -> None:
        pass

    def __len__(self) -> int:
        return 0


def _seen() -> Seen:
    data = DataDir(directory())
    with SqlitePool(data.pool_path, ME) as pool:
        pool.add([scored_group("gcd", "a", ("\0", "2"))])
    seen = Seen(Config(node=NodeSettings(data_dir=data.path)), data, ME, Feed(Quiet()), Control())
    seen.feed.started(info())
    seen.feed.network(snapshot())
    for number in (1, 2, 3):
        seen.feed.round_finished(record(number), {"gcd": 0.5}, [])
    disk = Disk(data.path, 0, Stop(), lambda level, text: None)
    kept = cast(Kept, _Nowhere())
    seen.place.desk = Desk(
        "person", _Stream(), FakeTasks(), POOL, kept, disk, samples=4, longest=LONGEST_ANSWER, round=lambda: 3
    )
    return seen


APP = make_app(V1(_seen()).routes(), Rules())


def seeds() -> list[bytes]:
    plain = [f"{operation.method} {operation.path}\n\n".encode() for operation in OPERATIONS]
    answer = b"POST /api/v1/contribute/answer\n\n"
    return [
        *plain,
        b"GET /api/v1/rounds?from=2&limit=7\n\n",
        b"GET /api/v1/rollouts?before=9&limit=3&origin=others&kind=gcd\n\n",
        answer + json.dumps({"id": KEY.decode(), "answer": "wrong"}).encode(),
        answer + json.dumps({"id": KEY.decode(), "answer": " right\r\n"}).encode(),
        answer + json.dumps({"id": "other", "answer": "é" * 60}).encode(),
        b"POST /api/v1/contribute/next\n\n" + json.dumps({"id": KEY.decode()}).encode(),
    ]


def run(data: bytes) -> None:
    first, _, body = data.partition(b"\n\n")
    status, said = trio.run(_asked, first, body)
    assert status in (200, 202, 307, 400, 403, 404, 405, 413, 503), status
    if status >= 400 and not first.upper().startswith(b"HEAD"):
        assert json.loads(said)["error"]["message"]
    # What was taken for an answer is what nodes take.
    for group in POOL.groups:
        for text in (completion.text for completion in group.group.completions):
            assert len(text) <= LONGEST_ANSWER
            assert not [char for char in text if unicodedata.category(char) == "Cc" and char not in "\n\t"]
    POOL.groups.clear()


async def _asked(first: bytes, body: bytes) -> tuple[int, bytes]:
    if KEY in body:
        _, task = await answered(APP, b"POST /api/v1/contribute/task", HEADERS, b"")
        body = body.replace(KEY, json.loads(task)["id"].encode())
    return await answered(APP, first, HEADERS, body)
