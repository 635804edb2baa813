"""Reputations through any history of offences, bans, kills and restarts: nothing is forgiven by them."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from p2p import reputation
from p2p.files import sweep
from p2p.reasons import Reason
from p2p.reputation import BAN_AT, BANS, MAX_CREDIT, Reputation, Standing
from tests.crashing import Crash, crashing
from tests.examples import few
from tests.p2p.fakes import Clock

MOST, SPARE = 6, 3
"""Peers remembered, few enough to be too few."""

PEERS = st.integers(0, 4).map("peer {}".format)
REASONS = st.sampled_from([Reason.SIGNATURE, Reason.DECODE, Reason.RATE, Reason.WRONG_PROMPT])
SECONDS = st.sampled_from([0.0, 1.0, 59.0, 3600.0, 2 * 86400.0])


class Reputations(RuleBasedStateMachine):
    """`kept` is what the file must say: the standings at the last save that was acknowledged, and when that was."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(reputation, "MAX_PEERS", MOST)
        self.patch.setattr(reputation, "_SPARE", SPARE)
        self.root = Path(tempfile.mkdtemp(prefix="reputations-"))
        self.path = self.root / "reputation.json"
        self.wall = Clock(1.8e9)
        self.bans: list[str] = []
        self.said: list[str] = []
        self.starts = 0
        self.start()
        self.kept: dict[str, Standing] = {}
        self.kept_at = self.wall.time

    def teardown(self) -> None:
        self.patch.undo()
        shutil.rmtree(self.root)

    def start(self) -> None:
        self.starts += 1
        # As `node.datadir` does.
        sweep(self.path)
        # The clock of a process begins anywhere.
        self.clock = Clock(1000.0 * (self.starts % 3))
        self.of = Reputation(
            self.path,
            self.bans.append,
            self.wall,
            clock=self.clock,
            say=lambda level, text: self.said.append(text),
        )
        self.of.load()

    def standings(self) -> dict[str, Standing]:
        return {row.peer: row for row in self.of.standings()}

    @rule(peer=PEERS, reason=REASONS, count=st.integers(1, 40))
    def offend(self, peer: str, reason: Reason, count: int) -> None:
        before, banned, told = self.of.score(peer), self.of.banned(peer), len(self.bans)
        bans = self.standings()[peer].bans if peer in self.standings() else 0
        self.of.offence(peer, reason, count)
        if banned:
            assert self.of.banned(peer) == banned
        elif self.of.banned(peer):
            assert self.of.banned(peer) == BANS[min(bans, len(BANS) - 1)]
            assert self.bans[told:] == [peer]
        else:
            assert self.of.score(peer) < before

    @rule(peer=PEERS, groups=st.integers(1, 1000))
    def earn(self, peer: str, groups: int) -> None:
        self.of.credit(peer, groups)

    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        self.clock.time += seconds
        self.wall.time += seconds

    @rule(jump=st.sampled_from([-7200.0, 7200.0]))
    def set_the_clock_of_the_machine(self, jump: float) -> None:
        before = self.standings()
        self.wall.time += jump
        assert self.standings() == before
        self.save()

    @rule(count=st.integers(1, 12))
    def crowd(self, count: int) -> None:
        """Strangers come and misbehave a little: they must not push out who is banned."""
        banned = {peer for peer, row in self.standings().items() if row.banned}
        for number in range(count):
            self.of.offence(f"stranger {number}", Reason.REPLAY)
        assert banned <= {peer for peer, row in self.standings().items() if row.banned}

    @rule()
    def save(self) -> None:
        self.of.save()
        self.kept, self.kept_at = self.standings(), self.wall.time

    @rule(at=st.integers(0, 8), away=SECONDS)
    def save_and_die(self, at: int, away: float) -> None:
        self.die(lambda: self.of.save(), at, away)

    @rule(away=SECONDS)
    def restart(self, away: float) -> None:
        self.die(lambda: None, 0, away)

    @rule(at=st.integers(0, 8))
    def save_to_a_full_disk(self, at: int) -> None:
        before = self.path.read_bytes() if self.path.exists() else None
        try:
            with crashing(None, full=at):
                self.of.save()
        except OSError:
            assert (self.path.read_bytes() if self.path.exists() else None) == before
        else:
            self.kept, self.kept_at = self.standings(), self.wall.time

    def die(self, last: Callable[[], None], at: int, away: float) -> None:
        would_be, now = self.standings(), self.wall.time
        known = [(self.kept, self.kept_at)]
        try:
            with crashing(at):
                last()
            known = [(self.kept, self.kept_at)] if at == 0 else [(would_be, now)]
        except Crash:
            known.append((would_be, now))
        self.wall.time += away
        self.start()
        found = self.standings()
        outcomes = [(rows, at) for rows, at in known if self.follows(found, rows, self.wall.time - at)]
        assert outcomes, f"{found} follows from none of {known}"
        self.kept, self.kept_at = outcomes[-1]

    def follows(self, found: dict[str, Standing], before: dict[str, Standing], seconds: float) -> bool:
        """Whether standings are those of before, so many seconds later."""
        for peer, row in before.items():
            if peer not in found and not row.banned and len(before) > MOST:
                continue  # least remarkable among too many
            left = max(row.banned - seconds, 0.0)
            now = found.get(peer, Standing(peer, 0.0, 0.0, 0))
            if now.banned != pytest.approx(left, abs=1e-3):
                return False
            faded = row.score * 0.5 ** (max(seconds - row.banned, 0.0) / reputation.HALF_LIFE)
            if now.score != pytest.approx(faded, abs=0.02):
                return False
            if now.bans < row.bans - int(max(seconds - row.banned, 0.0) / reputation.FORGIVEN) - 1:
                return False
        return set(found) <= set(before)

    @invariant()
    def all_is_in_bounds(self) -> None:
        rows = self.of.standings()
        assert len(rows) <= MOST + SPARE
        assert all(2 * BAN_AT <= row.score <= MAX_CREDIT and 0 <= row.banned <= BANS[-1] for row in rows)

    @invariant()
    def no_file_was_ever_damaged(self) -> None:
        assert not self.said

    @invariant()
    def little_is_left_lying_about(self) -> None:
        assert len(list(self.root.iterdir())) <= 2


def test_no_history_forgives_anybody() -> None:
    run_state_machine_as_test(Reputations, settings=few(20, steps=20))
