"""metrics.jsonl holds each finished round once, whatever happens while it is written."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from node.exchange import Counts
from node.outcome import record_of
from node.record import MetricsFile, Record
from node.rounds_file import RecordError
from rl.rollouts import UpdateStats
from rl.sapo import RoundResult
from tests.node.records import record, scored_group

ROOT = Path(__file__).parents[2]

KEYS = [
    "round",
    "time",
    "policy_step",
    "local_groups",
    "external_groups",
    "reward_local",
    "reward_external",
    "informative_fraction",
    "tokens_generated",
    "seconds_generate",
    "seconds_score",
    "seconds_update",
    "tokens_trained",
    "loss",
    "clip_fraction",
    "entropy",
    "grad_norm",
    "engine_logprob_gap",
    "peers",
    "batches_sent",
    "batches_received",
    "rejected",
    "seconds_share",
    "engine_restarts",
    "seconds_sync",
    "gate_refused",
    "gate_threshold",
    "learning_rate",
]


def test_a_line_has_the_documented_keys_in_their_order(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(record(1, rejected={"too_long": 2}))
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert list(json.loads(line)) == KEYS
    assert json.loads(line)["rejected"] == {"too_long": 2}
    documented = (ROOT / "docs" / "metrics.md").read_text()
    places = [documented.index(f"| `{key}` |") for key in KEYS]
    assert places == sorted(places)


def test_a_line_of_another_version_is_read(tmp_path: Path) -> None:
    # As version 0.1.0 wrote it. It must never have to be changed.
    old = (
        b'{"round":1,"time":1790000001.5,"policy_step":1,"local_groups":8,"external_groups":0,"reward_local":0.25,'
        b'"reward_external":null,"informative_fraction":0.5,"tokens_generated":640,"seconds_generate":2.0,'
        b'"seconds_score":0.25,"seconds_update":1.75,"tokens_trained":320,"loss":-0.0125,"clip_fraction":0.0,'
        b'"entropy":1.5,"grad_norm":0.75,"engine_logprob_gap":2e-6,"peers":0,"batches_sent":0,"batches_received":0,'
        b'"rejected":{"too_long":1}}\n'
    )
    new = old.replace(b'"round":1,', b'"round":2,').replace(b"}}", b'},"added_later":[1]}')
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(old + new)
    first, second = MetricsFile(path).read()
    assert first == record(1, rejected={"too_long": 1})
    assert second.round == 2
    MetricsFile(path).append(record(3))
    assert path.read_bytes().startswith(old + new), "and stays as it was"


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [record(number, reward_local=number / 7) for number in (1, 2, 5)]
    metrics = MetricsFile(path)
    assert list(metrics.read()) == []
    for one in records:
        metrics.append(one)
    assert list(MetricsFile(path).read()) == records
    assert MetricsFile(path).last(2) == records[1:]


def test_a_round_cannot_be_recorded_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append(record(3))
    before = path.read_bytes()
    for metrics in (MetricsFile(path), MetricsFile(path)):
        for number in (2, 3):
            with pytest.raises(ValueError, match="is recorded already"):
                metrics.append(record(number))
    assert path.read_bytes() == before


@pytest.mark.parametrize("tail", [b'{"round":3,"ti', b"\0\0\0\0", b"", b"{}", b"\0\0\n"])
def test_a_torn_last_line_is_passed_over_and_then_replaced(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    for number in (1, 2):
        MetricsFile(path).append(record(number))
    with path.open("ab") as file:
        file.write(tail)
    assert [r.round for r in MetricsFile(path).read()] == [1, 2]
    MetricsFile(path).append(record(3))
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_rewind_drops_later_rounds_and_a_torn_line_and_says_how_many(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    assert metrics.rewind(0) == 0
    for number in range(1, 8):
        metrics.append(record(number))
    with path.open("ab") as file:
        file.write(b'{"round":8')
    assert metrics.rewind(5) == 2
    assert [json.loads(line)["round"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]
    metrics.append(record(6))
    assert metrics.rewind(10) == 0
    assert metrics.rewind(0) == 6
    assert path.read_bytes() == b""


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append(record(1))
    good = path.read_bytes()
    path.write_bytes(good + b"garbage\n" + good)
    for read in (lambda: list(MetricsFile(path).read()), lambda: MetricsFile(path).rewind(2)):
        with pytest.raises(
            RecordError, match=r"metrics.jsonl:2: is not a record.*; delete that line, or move the file"
        ):
            read()
    path.write_bytes(good + good)
    with pytest.raises(RecordError, match="round 1 stands after round 1; delete that line"):
        MetricsFile(path).rewind(2)


def test_damage_behind_the_round_to_go_on_from_is_cut_away(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for number in (1, 2, 3):
        metrics.append(record(number))
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second + b"garbage\n" + third + first + b"[" * 100_000 + b"\n" + third[:20])
    assert metrics.rewind(2) == 1
    assert path.read_bytes() == first + second
    path.write_bytes(first + third + second)
    assert metrics.rewind(2) == 1, "what stands behind a later round went with it"
    assert path.read_bytes() == first


def test_rounds_that_have_gone_from_the_file_are_counted(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    assert metrics.missing(3) == 3, "there is no file"
    for number in (1, 2, 10, 11):
        metrics.append(record(number))
    assert [metrics.missing(last) for last in (0, 2, 10, 12)] == [0, 0, 7, 8]


def test_a_full_disk_leaves_whole_lines_and_the_round_can_be_written_later(tmp_path: Path) -> None:
    # A limit on the file's size fails a write half-way, as a full disk does.
    script = """
import resource, sys
from pathlib import Path
from node.record import MetricsFile
from tests.node.records import record
path = Path(sys.argv[1])
metrics = MetricsFile(path)
metrics.append(record(1))
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, limits[1]))
try:
    metrics.append(record(2))
except OSError as error:
    print(type(error).__name__, [r.round for r in MetricsFile(path).read()], path.read_bytes().endswith(b"}\\n"))
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
metrics.append(record(2))
print([r.round for r in MetricsFile(path).read()])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "metrics.jsonl")],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.splitlines() == ["OSError [1] True", "[1, 2]"]


def test_what_is_not_a_number_is_null() -> None:
    line = record(1, loss=math.nan, grad_norm=math.inf, entropy=None).model_dump_json()
    assert [json.loads(line)[key] for key in ("loss", "grad_norm", "entropy")] == [None, None, None]
    assert Record.model_validate_json(line).loss is None


def result(stats: UpdateStats | None) -> RoundResult:
    groups = (scored_group(),)
    return RoundResult(1, groups, groups, 0, 0, stats, "", 0.0, 0.0, 0.0, 0.0)


def test_what_the_gate_did_is_in_the_record() -> None:
    stats = UpdateStats(1, 9, 0.0, 0.0, 1.0, 1.0, 0.0, 1e-4, None, 8192, refused=(1,), refused_completions=3, gate=-2.5)
    gated = record_of(result(stats), 1, Counts(), 0)
    assert (gated.gate_refused, gated.gate_threshold) == (3, -2.5)
    assert (gated.external_groups, gated.reward_external) == (1, 0.5), "of what was chosen, refused or not"
    failed = record_of(result(None), 1, Counts(), 0)
    assert (failed.gate_refused, failed.gate_threshold) == (0, None)


def test_a_gate_that_lets_nothing_pass_yet_has_no_threshold_in_the_record() -> None:
    unknown = json.loads(record(1, gate_refused=3, gate_threshold=math.inf).model_dump_json())
    assert (unknown["gate_refused"], unknown["gate_threshold"]) == (3, None)
    known = json.loads(record(1, gate_threshold=-2.5).model_dump_json())
    assert (known["gate_refused"], known["gate_threshold"]) == (0, -2.5)
