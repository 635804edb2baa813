"""The pool against a model of it, through any history of rounds, rewinds and kills.

SQLite writes below Python, so a kill is a copy of its files as they were in the middle of the last call: the log is
written first, from wherever its writing began, and the database after it, from the log.
"""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from rl.pool import SqlitePool
from rl.rollouts import Completion, RolloutGroup, ScoredGroup
from tests.examples import few
from verifiers.base import Task, TaskRef

OWN, ORIGINS = "me", ("me", "a", "b")
MOST, PER_PEER, REUSE = 10, 3, 2
"""Groups in all, of one peer, and uses of one: few enough to be met often."""


def scored(number: int, origin: str, round_number: int, rewards: tuple[float, ...]) -> ScoredGroup:
    task = Task(TaskRef("fake", "1", "{}", 7, number), "kind", f"question {number}", "4")
    completions = tuple(Completion(f"answer {place}", True) for place in range(len(rewards)))
    return ScoredGroup(RolloutGroup(task, completions, 3), origin, round_number, rewards, tuple(0.0 for _ in rewards))


@dataclass(frozen=True)
class Row:
    """One group as the model knows it; `uses` are the rounds that trained on it."""

    number: int
    origin: str
    round: int
    informative: bool
    usable: bool
    uses: frozenset[int] = frozenset()


@dataclass
class Model:
    """What the pool is to hold, in the order in which it came."""

    rows: list[Row] = field(default_factory=list)

    def add(self, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            number = group.group.task.ref.index
            same = [row for row in self.rows if row.number == number]
            if group.origin not in [row.origin for row in same]:
                self.rows.append(Row(number, group.origin, group.round, group.informative, not same))
        for origin in {group.origin for group in groups} - {OWN}:
            self.keep([row for row in self.rows if row.origin == origin], PER_PEER)
        self.keep([row for row in self.rows if row.origin == OWN], MOST - MOST // 2)
        external = [row for row in self.rows if row.origin != OWN]
        self.keep(sorted(external, key=lambda row: row.informative), MOST // 2)

    def keep(self, rows: list[Row], most: int) -> None:
        """Of these, the last so many."""
        gone = rows[: max(len(rows) - most, 0)]
        self.rows = [row for row in self.rows if row not in gone]

    def settle(self, used: set[int], refused: set[int], number: int) -> None:
        """By place."""
        self.rows = [
            replace(
                row,
                uses=row.uses | {number} if place in used else row.uses,
                usable=row.usable and place not in refused,
            )
            for place, row in enumerate(self.rows)
        ]

    def rewind(self, last: int) -> None:
        self.rows = [
            replace(row, round=min(row.round, last + 1), uses=frozenset(n for n in row.uses if n <= last))
            for row in self.rows
            if row.origin != OWN or row.round <= last
        ]


class Files:
    """The pool's two files, as bytes."""

    def __init__(self, path: Path) -> None:
        log = path.with_name(f"{path.name}-wal")
        self.database, self.log = path.read_bytes(), log.read_bytes() if log.exists() else b""

    def write(self, path: Path) -> None:
        """As a process that was killed leaves them, to one that starts."""
        for old in path.parent.glob(f"{path.name}*"):
            old.unlink()
        path.write_bytes(self.database)
        path.with_name(f"{path.name}-wal").write_bytes(self.log)


def torn(before: Files, after: Files, share: float, path: Path) -> None:
    """The files when so much of what a call wrote was written."""
    done = int(share * (len(after.log) + len(after.database)))
    cut = Files.__new__(Files)
    cut.log = after.log[:done] + before.log[done:]
    done = max(done - len(after.log), 0)
    cut.database = after.database[:done] + before.database[done:]
    cut.write(path)


class Pools(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="pool-"))
        self.path = self.root / "pool.sqlite"
        self.model = Model()
        self.round = 1
        self.trained: dict[int, set[int]] = {}
        self.open()

    def teardown(self) -> None:
        self.pool.close()
        shutil.rmtree(self.root)

    def open(self) -> None:
        self.pool = SqlitePool(self.path, OWN, MOST, PER_PEER)
        # The log goes into the database again and again, not once in a thousand pages.
        self.pool._connection.execute("PRAGMA wal_autocheckpoint = 4")

    def change(self, share: float | None, do: Callable[[], object], model: Callable[[Model], None]) -> bool:
        """Do this to pool and model. With a share the process is killed when so much of it is written. Returns whether
        it is done then."""
        before, would_be = Files(self.path), Model(list(self.model.rows))
        model(would_be)
        do()
        if share is not None:
            after = Files(self.path)
            self.pool.close()
            torn(before, after, share, self.path)
            self.open()
            assert self.pool._connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            if self.rows() != self.expected(would_be):
                return False
        self.model = would_be
        return True

    def rows(self) -> list[tuple[int, str, int]]:
        """(task, origin, round) of all groups, oldest first."""
        return [(g.group.task.ref.index, g.origin, g.round) for g in reversed(self.pool.recent(100))] + self.uses()

    def uses(self) -> list[tuple[int, str, int]]:
        """(use count, origin, round) of those to choose from."""
        return [(c.uses, c.origin, c.round) for c in self.pool.candidates(0, REUSE)]

    def expected(self, model: Model) -> list[tuple[int, str, int]]:
        rows = [(row.number, row.origin, row.round) for row in model.rows]
        return rows + [
            (len(row.uses), row.origin, row.round)
            for row in model.rows
            if row.origin != OWN and row.informative and row.usable and len(row.uses) < REUSE
        ]

    @rule(
        numbers=st.lists(st.integers(0, 12), min_size=1, max_size=4),
        origin=st.sampled_from(ORIGINS),
        rewards=st.sampled_from([(1.0, 0.0), (0.0, 0.0)]),
        share=st.none() | st.floats(0, 1),
    )
    def come(self, numbers: list[int], origin: str, rewards: tuple[float, ...], share: float | None) -> None:
        groups = [scored(number, origin, self.round, rewards) for number in numbers]
        self.change(share, lambda: self.pool.add(groups), lambda model: model.add(groups))

    @rule(most=st.integers(1, 4), refuse=st.booleans(), share=st.none() | st.floats(0, 1))
    def train(self, most: int, refuse: bool, share: float | None) -> None:
        """A round: it ends with its use noted, or it has not been."""
        chosen = self.pool.candidates(0, REUSE)[:most]
        taken = self.pool.take([one.id for one in chosen])
        assert [(group.origin, group.round) for group in taken.values()] == [(one.origin, one.round) for one in chosen]
        names = [(group.group.task.ref.index, group.origin) for group in taken.values()]
        used = {place for place, row in enumerate(self.model.rows) if (row.number, row.origin) in names}
        number = self.round
        refused = set(sorted(used)[:1]) if refuse else set()
        done = self.change(
            share,
            lambda: self.pool.settle([one.id for one in chosen], [one.id for one in chosen[: len(refused)]], number),
            lambda model: model.settle(used, refused, number),
        )
        if done:
            for one in chosen:
                self.trained.setdefault(one.id, set()).add(number)
            self.round += 1

    @rule(back=st.integers(1, 4), share=st.none() | st.floats(0, 1))
    def rewind(self, back: int, share: float | None) -> None:
        last = max(self.round - back, 0)
        done = self.change(share, lambda: self.pool.rewind(last), lambda model: model.rewind(last))
        if not done:
            # The next start does it.
            self.pool.rewind(last)
            self.model.rewind(last)
        for rounds in self.trained.values():
            rounds.difference_update(range(last + 1, self.round + 1))
        self.round = last + 1

    @rule()
    def restart(self) -> None:
        self.pool.close()
        self.open()

    @invariant()
    def it_is_as_it_should_be(self) -> None:
        assert self.rows() == self.expected(self.model)

    @invariant()
    def nobody_has_more_than_its_share(self) -> None:
        origins = [row.origin for row in self.model.rows]
        assert len(self.pool) <= MOST
        assert origins.count(OWN) <= MOST - MOST // 2
        assert all(origins.count(origin) <= PER_PEER for origin in ORIGINS[1:])

    @invariant()
    def no_group_is_trained_on_more_often_than_allowed(self) -> None:
        assert all(len(rounds) <= REUSE for rounds in self.trained.values())


def test_no_history_loses_or_doubles_a_group() -> None:
    run_state_machine_as_test(Pools, settings=few(12, steps=15))
