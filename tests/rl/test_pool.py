"""The pool: what goes in comes out as text, once, bounded, and survives the process."""

import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rl.pool import PoolError, SqlitePool
from rl.rollouts import Completion, RolloutGroup, ScoredGroup
from verifiers.base import Task, TaskRef


def scored(
    number: int, *, kind: str = "gcd", round_number: int = 1, rewards: tuple[float, ...] = (1.0, 0.0)
) -> ScoredGroup:
    task = Task(TaskRef("reasoning_gym", "1", "{}", 7, number), kind, f"question {number}?", "4", None)
    completions = tuple(
        Completion(f"answer {place} ✓", place % 2 == 0, tokens=(1, 2, 3), logprobs=(-0.5, -1.0, -2.0))
        for place in range(len(rewards))
    )
    advantages = tuple(reward - sum(rewards) / len(rewards) for reward in rewards)
    return ScoredGroup(RolloutGroup(task, completions, policy_step=3), "me", round_number, rewards, advantages)


def test_groups_come_back_as_text_newest_first(tmp_path: Path) -> None:
    with SqlitePool(tmp_path / "pool.sqlite", max_groups=10) as pool:
        pool.add([scored(1), scored(2)])
        newest, oldest = pool.recent(10)
    assert newest.group.task.prompt == "question 2?"
    assert oldest.rewards == (1.0, 0.0)
    first = oldest.group.completions[0]
    assert (first.text, first.finished) == ("answer 0 ✓", True)
    assert first.tokens is None
    assert first.logprobs is None


def test_the_same_group_is_kept_once(tmp_path: Path) -> None:
    with SqlitePool(tmp_path / "pool.sqlite", max_groups=10) as pool:
        assert pool.add([scored(1), scored(2)]) == 2
        assert pool.add([scored(2), scored(3)]) == 1
        assert len(pool) == 3


def test_the_oldest_groups_go_when_it_is_full(tmp_path: Path) -> None:
    with SqlitePool(tmp_path / "pool.sqlite", max_groups=3) as pool:
        for number in range(5):
            pool.add([scored(number)])
        assert [group.group.task.ref.index for group in pool.recent(10)] == [4, 3, 2]


def test_rewind_forgets_later_rounds_only(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    with SqlitePool(path, max_groups=10) as pool:
        pool.add([scored(number, round_number=number) for number in range(1, 6)])
    with SqlitePool(path, max_groups=10) as pool:
        assert pool.rewind(3, "me") == 2
        assert sorted(group.round for group in pool.recent(10)) == [1, 2, 3]
        # What is done again may come out the same; it is new to the pool then.
        assert pool.add([scored(4, round_number=4)]) == 1


def test_success_by_kind(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    with SqlitePool(path, max_groups=10) as pool:
        pool.add([
            scored(1, kind="gcd", rewards=(1.0, 0.0)),
            scored(2, kind="gcd", rewards=(0.0, 0.0)),
            scored(3, kind="lcm", rewards=(1.0, 1.0), round_number=2),
        ])  # fmt: skip
        # Read while it is open for writing, as by `status` beside a running node.
        success = {entry.kind: (entry.groups, entry.reward) for entry in SqlitePool.success_in(path, since_round=1)}
        assert success == {"gcd": (2, 0.25), "lcm": (1, 1.0)}
        assert [entry.kind for entry in SqlitePool.success_in(path, since_round=2)] == ["lcm"]
        assert SqlitePool.success_in(path, since_round=1, origin="somebody else") == []
    assert len(SqlitePool.success_in(path, since_round=1)) == 2


def test_looking_at_a_pool_makes_none(tmp_path: Path) -> None:
    assert SqlitePool.success_in(tmp_path / "pool.sqlite", since_round=1) == []
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "pool.sqlite").write_bytes(b"nonsense " * 100)
    with pytest.raises(PoolError, match="cannot be read"):
        SqlitePool.success_in(tmp_path / "pool.sqlite", since_round=1)


def test_a_copy_by_another_node_does_not_displace_the_group(tmp_path: Path) -> None:
    with SqlitePool(tmp_path / "pool.sqlite", max_groups=10) as pool:
        stolen = replace(scored(1), origin="thief")
        assert pool.add([stolen]) == 1
        assert pool.add([scored(1)]) == 1
        # Another step on the same answers makes no new group.
        assert pool.add([replace(stolen, group=replace(stolen.group, policy_step=9))]) == 0
        # Rewinding is about this node's own rounds.
        assert pool.rewind(0, "me") == 1
        assert [group.origin for group in pool.recent(10)] == ["thief"]


def test_a_file_that_is_no_pool_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    path.write_bytes(b"this is not a database" * 1000)
    with pytest.raises(PoolError, match="move it away"):
        SqlitePool(path, max_groups=10)
    assert path.read_bytes().startswith(b"this is not a database")


def test_a_pool_of_another_layout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    SqlitePool(path, max_groups=10).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(PoolError, match="layout 99"):
        SqlitePool(path, max_groups=10)


def test_what_was_added_survives_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    program = (
        "import sys; from pathlib import Path; sys.path[:0] = [sys.argv[2], sys.argv[3]]\n"
        "from test_pool import scored; from rl.pool import SqlitePool\n"
        "pool = SqlitePool(Path(sys.argv[1]), 1000)\n"
        "for number in range(1000):\n"
        "    pool.add([scored(number)]); print(number, flush=True)\n"
    )
    here = Path(__file__)
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(path), str(here.parent), str(here.parents[2])], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) == 40:
            break
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with SqlitePool(path, max_groups=1000) as pool:
        assert len(pool) >= 41
