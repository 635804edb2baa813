"""Checkpoints through any history of saves, kills, power cuts, full disks and bit rot."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rl.checkpoint import CheckpointStore
from tests.crashing import Crash, crashing
from tests.examples import few

KEEP = 2
OPERATIONS = st.integers(0, 60)
"""At which operation it dies; most saves have fewer than 40."""


class Checkpoints(RuleBasedStateMachine):
    """`whole` is what must be there: round -> content, as acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="checkpoints-"))
        self.directory = self.root / "checkpoints"
        self.store = CheckpointStore(self.directory, KEEP)
        self.whole: dict[int, str] = {}
        self.rotten: set[int] = set()
        self.saves = 0

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def write(self, number: int, content: str) -> None:
        """As a node does it: what the learner fails to write is discarded."""
        directory = self.store.begin(number)
        try:
            (directory / "adapter").write_text(content)
            (directory / "more").mkdir()
            (directory / "more" / "part").write_text(content)
        except BaseException:
            self.store.discard(directory)
            raise
        self.store.commit(number, directory, {"content": content})

    def read(self) -> tuple[int, str] | None:
        """The newest one, all of whose parts are of one save."""
        found = self.store.newest()
        if found is None:
            return None
        contents = {(found.path / "adapter").read_text(), (found.path / "more" / "part").read_text()}
        assert contents == {found.state["content"]}
        return found.round, found.state["content"]

    def reopen(self, lives: list[int]) -> None:
        """Starts that are killed on the way, then one that is not."""
        for left in lives:
            try:
                with crashing(left):
                    CheckpointStore(self.directory, KEEP)
            except Crash:
                note(f"a start was killed after {left} operations")
        self.store = CheckpointStore(self.directory, KEEP)
        assert not [path.name for path in self.directory.iterdir() if path.name.startswith(".")]

    def next_round(self, further: int) -> int:
        """The round to save next: a node goes on from the newest whole one, past any that is damaged."""
        newest = self.read()
        return (newest[0] if newest else 0) + further

    def saved(self, number: int, content: str) -> None:
        self.whole[number] = content
        self.rotten.discard(number)
        for old in sorted(self.whole)[:-KEEP]:
            del self.whole[old]

    @rule(further=st.integers(0, 3))
    def save(self, further: int) -> None:
        number, self.saves = self.next_round(further), self.saves + 1
        self.write(number, f"save {self.saves}")
        self.saved(number, f"save {self.saves}")
        assert set(self.whole) <= {*self.store.rounds()} <= {*self.whole, *self.rotten}

    @rule(further=st.integers(0, 3), at=OPERATIONS, power=st.booleans(), again=st.lists(st.integers(0, 12), max_size=2))
    def save_and_die(self, further: int, at: int, power: bool, again: list[int]) -> None:
        number, self.saves = self.next_round(further), self.saves + 1
        content = f"save {self.saves}"
        before = self.read()
        try:
            with crashing(at) as disk:
                self.write(number, content)
        except Crash:
            if power:
                disk.lose_power(self.root)
            self.reopen(again)
            now = self.read()
            assert now in (before, (number, content))
            if now == before:
                return
        self.saved(number, content)

    @rule(further=st.integers(0, 3), at=st.integers(0, 20))
    def save_to_a_full_disk(self, further: int, at: int) -> None:
        number, self.saves = self.next_round(further), self.saves + 1
        before = self.read()
        try:
            with crashing(None, full=at):
                self.write(number, f"save {self.saves}")
        except OSError:
            assert self.read() == before
            assert not [path.name for path in self.directory.iterdir() if path.name.startswith(".")]
        else:
            self.saved(number, f"save {self.saves}")

    @precondition(lambda self: len(self.whole) == KEEP)
    @rule(place=st.integers(0, 1000))
    def rot(self, place: int) -> None:
        """A bit of the newest changes. Only while another is behind it: two at once are beyond any promise."""
        newest = max(self.whole)
        files = sorted(path for path in (self.directory / f"{newest:08d}").rglob("*") if path.is_file())
        path = files[place % len(files)]
        data = bytearray(path.read_bytes())
        data[place % len(data)] ^= 1
        path.write_bytes(data)
        del self.whole[newest]
        self.rotten.add(newest)
        self.reopen([])

    @rule(lives=st.lists(st.integers(0, 12), max_size=2))
    def restart(self, lives: list[int]) -> None:
        self.reopen(lives)

    @invariant()
    def the_newest_acknowledged_one_is_there(self) -> None:
        newest = max(self.whole, default=None)
        assert self.read() == (None if newest is None else (newest, self.whole[newest]))
        assert {int(damaged.path.name) for damaged in self.store.damaged} <= self.rotten

    @invariant()
    def all_that_are_kept_are_whole(self) -> None:
        store = CheckpointStore(self.directory, KEEP)
        found = {number for number in self.whole if store._is_whole(self.directory / f"{number:08d}")}
        assert found == set(self.whole)


def test_no_history_loses_or_spoils_a_checkpoint() -> None:
    run_state_machine_as_test(Checkpoints, settings=few(8, steps=8))
