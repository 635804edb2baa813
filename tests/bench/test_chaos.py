"""The benchmark of faults sees what it is to see; it is not run here."""

import hashlib
import itertools
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from bench.chaos.checks import growth, problems_of_checkpoints, problems_of_pool, problems_of_record
from bench.chaos.clock import shift, write_offset
from bench.chaos.members import Sample
from bench.chaos.plan import CLOCK_SECONDS, WEIGHTS, draw
from node.record import MetricsFile
from rl.checkpoint import CheckpointStore
from rl.pool import SqlitePool
from tests.node.records import record


def test_faults_follow_from_the_seed_and_are_all_over_in_time() -> None:
    faults = draw(1, 8, 960, list(WEIGHTS))
    assert faults == draw(1, 8, 960, list(WEIGHTS)) != draw(2, 8, 960, list(WEIGHTS))
    assert {fault.kind for fault in faults} == set(WEIGHTS)
    assert all(0 <= fault.at <= fault.end <= 960 for fault in faults)
    assert {abs(fault.amount) for fault in faults if fault.kind == "clock"} == {CLOCK_SECONDS}


def test_a_node_is_killed_or_stopped_but_never_both_and_has_one_trouble_with_its_disk_at_a_time() -> None:
    faults = draw(3, 4, 1200, list(WEIGHTS))
    for kinds in ({"kill", "learner", "stop"}, {"full", "read-only"}, {"slow"}, {"clock"}):
        for node in range(1, 5):
            mine = [fault for fault in faults if fault.kind in kinds and node in fault.nodes]
            assert all(one.end < next_one.at for one, next_one in itertools.pairwise(mine))


def test_only_what_a_place_can_do_is_drawn() -> None:
    assert {fault.kind for fault in draw(1, 3, 600, ["kill", "stop"])} == {"kill", "stop"}


def write_rounds(path: Path, *rounds: int) -> bytes:
    path.unlink(missing_ok=True)
    for number in rounds:
        MetricsFile(path).append(record(number))
    return path.read_bytes()


def test_a_round_that_is_missing_or_stands_twice_and_a_torn_line_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = write_rounds(path, 1, 2, 3)
    assert problems_of_record(path) == []
    path.write_bytes(whole + whole.splitlines(keepends=True)[-1])
    assert len(problems_of_record(path)) == 1
    path.write_bytes(whole[:-5])
    assert len(problems_of_record(path)) == 1
    write_rounds(path, 1, 3)
    assert "[2]" in problems_of_record(path)[0]
    path.unlink()
    assert len(problems_of_record(path)) == 1


def test_a_damaged_checkpoint_a_missing_one_and_what_is_left_over_are_seen(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    directory = store.begin(10)
    (directory / "weights").write_bytes(b"1234")
    store.commit(10, directory, {})
    assert problems_of_checkpoints(tmp_path, 10) == []
    assert len(problems_of_checkpoints(tmp_path, 11)) == 1
    weights = tmp_path / "00000010" / "weights"
    assert hashlib.sha256(b"1234").hexdigest() in (tmp_path / "00000010" / "manifest.json").read_text()
    weights.write_bytes(b"1235")
    assert len(problems_of_checkpoints(tmp_path, 10)) == 1
    weights.unlink()
    assert problems_of_checkpoints(tmp_path, 10)
    shutil.rmtree(tmp_path / "00000010")
    store.begin(20)
    assert len(problems_of_checkpoints(tmp_path, 0)) == 1


def test_a_damaged_pool_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    SqlitePool(path, "me").close()
    assert problems_of_pool(path) == []
    with closing(sqlite3.connect(path)) as pool:
        pool.execute("INSERT INTO draws VALUES (7, 1)")
        pool.commit()
    assert len(problems_of_pool(path)) == 1
    path.write_bytes(b"no pool at all" * 100)
    assert len(problems_of_pool(path)) == 1


def samples(pid: int, since: int, megabytes: float, slope: float) -> list[Sample]:
    return [
        Sample(at, "node", pid, 10, int(2**20 * (megabytes + slope * (at - since))), 20)
        for at in range(since, since + 100)
    ]


def test_growth_is_that_of_processes_and_not_of_one_that_is_larger_than_another() -> None:
    flat = samples(1, 100, 100, 0.0) + samples(2, 200, 150, 0.0)
    assert growth(flat, 100) == pytest.approx((0, 0))
    growing = samples(1, 100, 100, 0.5) + samples(2, 200, 60, 0.5)
    assert growth(growing, 100) == pytest.approx((0.5 * 99, 0))
    loading = [*samples(1, 100, 100, 0.0), Sample(150, "node", 2, 0, 0, 0), Sample(160, "node", 2, 1, 2**30, 0)]
    assert growth(loading, 100) == pytest.approx((0, 0))
    assert growth([], 0) == (0, 0)


def test_a_clock_is_moved_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clock"
    write_offset(path, 0.0)
    true = time.time
    # Put back at the end.
    monkeypatch.setattr(time, "time", time.time)
    monkeypatch.setattr(time, "time_ns", time.time_ns)
    shift(path)
    assert abs(time.time() - true()) < 60
    write_offset(path, -CLOCK_SECONDS)
    assert -3660 < time.time() - true() < -3540
    assert -3660 < time.time_ns() / 1e9 - true() < -3540
