"""The record through any history of rounds, kills, power cuts and full disks: each round once, none half."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from node.record import MetricsFile
from tests.crashing import Crash, crashing
from tests.examples import few
from tests.node.records import record

OPERATIONS = st.integers(0, 6)


class Records(RuleBasedStateMachine):
    """`rounds` are those acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="record-"))
        self.path = self.root / "metrics.jsonl"
        self.file = MetricsFile(self.path)
        self.rounds: list[int] = []

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def found(self) -> list[int]:
        return [record.round for record in MetricsFile(self.path).read()]

    def next_round(self, skipped: int) -> int:
        return (self.rounds[-1] if self.rounds else 0) + 1 + skipped

    @rule(skipped=st.integers(0, 2))
    def append(self, skipped: int) -> None:
        number = self.next_round(skipped)
        self.file.append(record(number))
        self.rounds.append(number)

    @rule(at=OPERATIONS, power=st.booleans())
    def append_and_die(self, at: int, power: bool) -> None:
        number = self.next_round(0)
        try:
            with crashing(at) as disk:
                self.file.append(record(number))
        except Crash:
            # What an append left unsynced may be anything; the lines before it were synced with it.
            if power and self.found() == self.rounds and self.path.exists():
                self.torn(disk.done)
            self.file = MetricsFile(self.path)
            if self.found() == self.rounds:
                return
        self.rounds.append(number)

    def torn(self, length: int) -> None:
        with self.path.open("ab") as file:
            file.write(b"\0" * length)

    @rule(at=OPERATIONS)
    def append_to_a_full_disk(self, at: int) -> None:
        number, before = self.next_round(0), self.path.read_bytes() if self.path.exists() else b""
        try:
            with crashing(None, full=at):
                self.file.append(record(number))
        except OSError:
            # But for a torn line that an earlier kill has left.
            assert before.startswith(self.path.read_bytes() if self.path.exists() else b"")
        else:
            self.rounds.append(number)

    @rule(back=st.integers(0, 5), at=OPERATIONS)
    def rewind(self, back: int, at: int) -> None:
        """As every life of a learner begins, killed or not."""
        last = max(self.next_round(0) - 1 - back, 0)
        kept = [number for number in self.rounds if number <= last]
        self.file = MetricsFile(self.path)
        try:
            with crashing(at):
                assert self.file.rewind(last) == len(self.rounds) - len(kept)
        except Crash:
            self.file = MetricsFile(self.path)
            assert self.found() in (self.rounds, kept)
            kept = self.found()
        self.rounds = kept

    @invariant()
    def each_round_is_there_once(self) -> None:
        assert self.found() == self.rounds


def test_no_history_loses_or_doubles_a_round() -> None:
    run_state_machine_as_test(Records, settings=few(20, steps=12))
