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
    number: int,
    *,
    kind: str = "gcd",
    round_number: int = 1,
    rewards: tuple[float, ...] = (1.0, 0.0),
    origin: str = "me",
) -> ScoredGroup:
    task = Task(TaskRef("reasoning_gym", "1", "{}", 7, number), kind, f"question {number}?", "4", None)
    completions = tuple(
        Completion(f"answer {place} ✓", place % 2 == 0, tokens=(1, 2, 3), logprobs=(-0.5, -1.0, -2.0))
        for place in range(len(rewards))
    )
    advantages = tuple(reward - sum(rewards) / len(rewards) for reward in rewards)
    return ScoredGroup(RolloutGroup(task, completions, policy_step=3), origin, round_number, rewards, advantages)


def test_groups_come_back_as_text_newest_first(tmp_path: Path) -> None:
    with SqlitePool(tmp_path / "pool.sqlite", "me") as pool:
        pool.add([scored(1), scored(2)])
        newest, oldest = pool.recent(10)
    assert newest.group.task.prompt == "question 2?"
    assert oldest.rewards == (1.0, 0.0)
    first = oldest.group.completions[0]
    assert (first.text, first.finished) == ("answer 0 ✓", True)
    assert first.tokens is None
    assert first.logprobs is None


def test_the_same_group_is_kept_once(tmp_path: Path) -> None:
    with SqlitePool(tmp_path / "pool.sqlite", "me") as pool:
        assert pool.add([scored(1), scored(2)]) == 2
        assert pool.add([scored(2), scored(3)]) == 1
        assert len(pool) == 3


def indices(pool: SqlitePool, origin: str | None = None) -> list[int]:
    """Of the groups in the pool, newest first."""
    return [group.group.task.ref.index for group in pool.recent(100) if origin in (None, group.origin)]


def test_the_oldest_groups_go_when_it_is_full(tmp_path: Path) -> None:
    with SqlitePool(tmp_path / "pool.sqlite", "me", max_groups=6) as pool:
        for number in range(5):
            pool.add([scored(number)])
        assert indices(pool) == [4, 3, 2]


def test_a_full_disk_leaves_it_as_it_was(tmp_path: Path) -> None:
    with SqlitePool(tmp_path / "pool.sqlite", "me") as pool:
        pool.add([scored(0)])
        (pages,) = pool._connection.execute("PRAGMA page_count").fetchone()
        pool._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(sqlite3.OperationalError, match="full"):
            pool.add([scored(number) for number in range(1, 200)])
        assert len(pool) == 1
        pool._connection.execute("PRAGMA max_page_count = 100000")
        assert pool.add([scored(number) for number in range(200)]) == 199


def test_others_cannot_push_out_own_groups_nor_own_ones_theirs(tmp_path: Path) -> None:
    with SqlitePool(tmp_path / "pool.sqlite", "me", max_groups=6) as pool:
        pool.add([scored(number) for number in range(3)])
        pool.add([scored(number, origin=f"peer {number}") for number in range(10, 20)])
        pool.add([scored(3)])
        assert indices(pool) == [3, 19, 18, 17, 2, 1]


def test_one_peer_cannot_fill_the_others_half_and_loses_its_own_oldest(tmp_path: Path) -> None:
    with SqlitePool(tmp_path / "pool.sqlite", "me", max_groups=10, per_peer=2) as pool:
        pool.add([scored(1, origin="quiet")])
        pool.add([scored(number, origin="loud") for number in range(10, 20)])
        assert indices(pool) == [19, 18, 1]


def test_of_others_groups_those_that_teach_nothing_go_first(tmp_path: Path) -> None:
    with SqlitePool(tmp_path / "pool.sqlite", "me", max_groups=4) as pool:
        pool.add([scored(1, origin="a"), scored(2, origin="b", rewards=(1.0, 1.0))])
        pool.add([scored(3, origin="c")])
        assert indices(pool) == [3, 1]


def test_candidates_are_informative_young_and_not_used_up(tmp_path: Path) -> None:
    with SqlitePool(tmp_path / "pool.sqlite", "me") as pool:
        pool.add([
            scored(1),
            scored(2, origin="a", round_number=4),
            scored(3, origin="a", round_number=5),
            scored(4, origin="b", round_number=6, rewards=(0.0, 0.0)),
            scored(5, origin="b", round_number=6, kind="lcm"),
        ])  # fmt: skip
        old, young, other = pool.candidates(since=4, reuse=1)
        assert [candidate.id for candidate in pool.candidates(since=5, reuse=1)] == [young.id, other.id]
        assert (other.origin, other.kind, other.round, other.reward, other.uses) == ("b", "lcm", 6, 0.5, 0)
        taken = pool.take([other.id, old.id, 99])
        assert [(key, group.group.task.ref.index) for key, group in taken.items()] == [(other.id, 5), (old.id, 2)]
        pool.settle([old.id], [young.id], 7)
        assert pool.candidates(since=0, reuse=1) == [other]
        assert [candidate.uses for candidate in pool.candidates(since=0, reuse=2)] == [1, 0]
        assert pool.candidates(since=0, reuse=2)[0].id == old.id, "what was refused never comes back"


def test_a_copy_under_another_name_is_no_second_candidate(tmp_path: Path) -> None:
    with SqlitePool(tmp_path / "pool.sqlite", "me") as pool:
        pool.add([scored(1), scored(1, origin="thief"), scored(2, origin="a"), scored(2, origin="thief")])
        assert [candidate.origin for candidate in pool.candidates(since=0, reuse=1)] == ["a"]


def test_rewind_gives_back_what_the_forgotten_rounds_used_and_keeps_what_came_in_them(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    with SqlitePool(path, "me") as pool:
        pool.add([scored(number, origin="a", round_number=number) for number in (1, 2, 9)])
        first, second, _ = pool.candidates(since=0, reuse=1)
        pool.settle([first.id], [], 3)
        pool.settle([second.id], [], 8)
    with SqlitePool(path, "me") as pool:
        assert pool.rewind(5) == 0
        back = pool.candidates(since=0, reuse=1)
        assert [candidate.round for candidate in back] == [2, 6], "what came later counts as come in the next round"
        assert back[0] == second
        assert sorted(group.round for group in pool.recent(10)) == [1, 2, 6]


def test_rewind_forgets_later_rounds_only(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    with SqlitePool(path, "me") as pool:
        pool.add([scored(number, round_number=number) for number in range(1, 6)])
    with SqlitePool(path, "me") as pool:
        assert pool.rewind(3) == 2
        assert sorted(group.round for group in pool.recent(10)) == [1, 2, 3]
        # What is done again may come out the same; it is new to the pool then.
        assert pool.add([scored(4, round_number=4)]) == 1


def test_success_by_kind(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    with SqlitePool(path, "me") as pool:
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
    with SqlitePool(tmp_path / "pool.sqlite", "me") as pool:
        stolen = replace(scored(1), origin="thief")
        assert pool.add([stolen]) == 1
        assert pool.add([scored(1)]) == 1
        # Another step on the same answers makes no new group.
        assert pool.add([replace(stolen, group=replace(stolen.group, policy_step=9))]) == 0
        # Rewinding is about this node's own rounds.
        assert pool.rewind(0) == 1
        assert [group.origin for group in pool.recent(10)] == ["thief"]


def test_a_file_that_is_no_pool_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    path.write_bytes(b"this is not a database" * 1000)
    with pytest.raises(PoolError, match="move it away"):
        SqlitePool(path, "me")
    assert path.read_bytes().startswith(b"this is not a database")


def test_a_pool_of_another_layout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    SqlitePool(path, "me").close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(PoolError, match="layout 99"):
        SqlitePool(path, "me")


def test_a_pool_of_layout_1_is_taken_over_as_the_nodes_own(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    with SqlitePool(path, "me") as pool:
        pool.add([scored(1, kind="gcd"), scored(2, kind="lcm", round_number=3)])
        rows = pool._connection.execute(
            "SELECT digest, round, 'my old id', kind, completions, reward, body FROM groups"
        )
        old = rows.fetchall()
    path.unlink()
    connection = sqlite3.connect(path)
    # As version 0.1.0 made it.
    connection.executescript("""
        CREATE TABLE groups (id INTEGER PRIMARY KEY, digest BLOB NOT NULL, round INTEGER NOT NULL, origin TEXT NOT NULL,
            kind TEXT NOT NULL, completions INTEGER NOT NULL, reward REAL NOT NULL, body BLOB NOT NULL,
            UNIQUE (digest, origin));
        CREATE INDEX groups_round ON groups (round);
        PRAGMA user_version = 1;
    """)
    connection.executemany(
        "INSERT INTO groups (digest, round, origin, kind, completions, reward, body) VALUES (?, ?, ?, ?, ?, ?, ?)", old
    )
    connection.commit()
    connection.close()
    for _ in range(2):
        with SqlitePool(path, "me") as pool:
            assert [(group.origin, group.round) for group in pool.recent(10)] == [("me", 3), ("me", 1)]
            assert pool.candidates(since=0, reuse=1) == []
            assert pool.add([scored(1)]) == 0
    assert [entry.kind for entry in SqlitePool.success_in(path, since_round=2, origin="me")] == ["lcm"]


def test_what_was_added_survives_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "pool.sqlite"
    program = (
        "import sys; from pathlib import Path; sys.path[:0] = [sys.argv[2], sys.argv[3]]\n"
        "from test_pool import scored; from rl.pool import SqlitePool\n"
        "pool = SqlitePool(Path(sys.argv[1]), 'me')\n"
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
    with SqlitePool(path, "me") as pool:
        assert len(pool) >= 41


def test_trust_is_the_share_of_what_was_tried_that_the_gate_let_pass(tmp_path: Path) -> None:
    with SqlitePool(tmp_path / "pool.sqlite", "me") as pool:
        pool.add([scored(number, origin=origin, round_number=3) for number, origin in enumerate("aaaaabbbc")])
        ids = [candidate.id for candidate in pool.candidates(since=0, reuse=9)]
        pool.settle(ids[:8], [], 4)
        pool.settle([], ids[:3], 4)
        # Never tried: it did not fit.
        pool.settle([], ids[8:], 4)
        pool.add([scored(20, origin="c", round_number=4)])
        trust = {candidate.origin: candidate.trust for candidate in pool.candidates(since=0, reuse=9)}
        assert trust == {"a": pytest.approx(3 / 6), "b": 1.0, "c": 1.0}
        assert {candidate.trust for candidate in pool.candidates(since=4, reuse=9)} == {1.0}, "what is old is forgotten"
