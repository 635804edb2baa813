"""`metrics.jsonl`, which every start and `swarmnode status` read."""

import math

from node.record import MetricsFile
from node.rounds_file import RecordError
from tests.fuzz.scratch import directory
from tests.node.records import record

PATH = directory() / "metrics.jsonl"


def seeds() -> list[bytes]:
    lines = [record(number).model_dump_json().encode() + b"\n" for number in (1, 2, 3)]
    return [b"", lines[0], b"".join(lines), b"".join(lines)[:-9], lines[0] + bytes(40)]


def run(data: bytes) -> None:
    PATH.write_bytes(data)
    file = MetricsFile(PATH)
    try:
        rounds = list(file.read())
    except RecordError as error:
        assert str(PATH) in str(error)
        return
    assert [one.round for one in rounds] == sorted({one.round for one in rounds})
    for one in rounds:
        assert math.isfinite(one.time)
        assert one.round < 2**63
        assert math.isfinite(one.reward_local)
    last = rounds[-1].round if rounds else 0
    if last < 2**62:
        file.append(record(last + 1))
        assert [one.round for one in MetricsFile(PATH).read()] == [*(one.round for one in rounds), last + 1]
    assert MetricsFile(PATH).rewind(0) >= len(rounds)
    assert not PATH.read_bytes()
