"""A file of rollouts from somebody else, on its way into the pool by `swarmnode rollouts import`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import trio

from node.config import Config
from node.importing import Outcome, _Importer
from node.rollouts_file import read_rows, row_of
from p2p.reasons import Reason
from p2p.wire import WireGroup, decode_batch, encode_batch
from rl.pool import SqlitePool
from rl.rollouts import Completion, RolloutGroup, ScoredGroup
from tests.fuzz.scratch import directory
from tests.p2p.fakes import FakeTasks, numbers
from tests.p2p.forging import batch, peer
from verifiers.base import Task, TaskRef

PATH = directory() / "theirs.jsonl"
PLACES = numbers()(3)


class _Stream:
    def makes(self, ref: TaskRef) -> bool:
        return False


def _rows() -> Iterator[dict[str, Any]]:
    for place in PLACES:
        task = Task(TaskRef("fake", "1", "{}", 1, place), "sum", f"question {place}", None)
        answers = (Completion("right", True), Completion("wrong é", False))
        yield row_of(ScoredGroup(RolloutGroup(task, answers, 3), peer(1), 9, (1.0, 0.0), (1.0, -1.0)))


def seeds() -> list[bytes]:
    lines = [json.dumps(row).encode() + b"\n" for row in _rows()]
    return [b"", *lines, b"".join(lines), b"".join(lines)[:-9], b"\n\n{}\n" + lines[0]]


def run(data: bytes) -> None:
    PATH.write_bytes(data)
    found = list(read_rows(PATH))
    groups = [group for group in found if not isinstance(group, Reason)]
    for group in groups:
        # It is what a peer could have told.
        [told] = decode_batch(encode_batch(batch(1, [group]))).groups
        assert told == group
    trio.run(_taken, groups)


async def _taken(groups: list[WireGroup]) -> None:
    outcome = Outcome("import:theirs")
    importer = _Importer(Config(), outcome.origin, 4, outcome)
    with SqlitePool(Path(":memory:"), peer(2)) as pool:
        for group in groups:
            await importer.take(group, pool, cast(Any, FakeTasks()), cast(Any, _Stream()))
    assert outcome.imported + outcome.known + outcome.no_room + outcome.refused.total() == len(groups)
