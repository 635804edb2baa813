"""Offences cost, fade and end in bans that grow, whatever clocks and files do."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from p2p.reasons import Reason
from p2p.reputation import AFTER_BAN, BANS, HALF_LIFE, MAX_CREDIT, MAX_PEERS, WEIGHTS, Reputation
from tests.p2p.fakes import Clock

DAY = 86400.0


class Watched:
    """A reputation with clocks of its own, and what it told others."""

    def __init__(self, path: Path | None = None, wall: float = 1.8e9) -> None:
        self.clock, self.wall = Clock(1000.0), Clock(wall)
        self.bans: list[str] = []
        self.said: list[str] = []
        self.of = Reputation(
            path, self.bans.append, self.wall, clock=self.clock, say=lambda level, text: self.said.append(text)
        )

    def pass_time(self, seconds: float) -> None:
        self.clock.time += seconds
        self.wall.time += seconds

    def ban(self, peer: str) -> float:
        """Offend until it is banned; for how long."""
        while not self.of.banned(peer):
            self.of.offence(peer, Reason.SIGNATURE)
        return self.of.banned(peer)


def test_every_reason_has_a_weight() -> None:
    assert set(WEIGHTS) == set(Reason)


def test_a_stranger_is_neutral() -> None:
    watched = Watched()
    assert watched.of.score("a") == 0
    assert watched.of.banned("a") == 0
    assert watched.of.standings() == []


@pytest.mark.parametrize(
    ("reason", "at_most"),
    [
        (Reason.SIGNATURE, 2),
        (Reason.DECODE, 3),
        (Reason.SCHEMA, 3),
        (Reason.TOO_LARGE, 3),
        (Reason.PROTOCOL, 4),
        (Reason.WRONG_PROMPT, 10),
        (Reason.NO_SUCH_TASK, 10),
        (Reason.HELD_OUT, 10),
        (Reason.RATE, 100),
    ],
)
def test_repeated_offences_ban(reason: Reason, at_most: int) -> None:
    watched = Watched()
    watched.of.offence("a", reason)
    assert watched.of.score("a") < 0
    for _ in range(at_most - 1):
        watched.of.offence("a", reason)
    assert watched.bans == ["a"]
    assert watched.of.banned("a") == BANS[0]
    assert watched.of.banned("b") == 0


@pytest.mark.parametrize(
    "reason",
    [
        Reason.STALE,
        Reason.OVERLOADED,
        Reason.CAPPED,
        Reason.TOO_LONG,
        Reason.BANNED,
        Reason.NOT_ALLOWED,
        Reason.WRONG_SHARD,
    ],
)
def test_what_is_nobodys_fault_costs_nothing(reason: Reason) -> None:
    watched = Watched()
    watched.of.offence("a", reason, 10**6)
    assert watched.of.score("a") == 0


def test_an_hour_of_foreign_tasks_bans_nobody() -> None:
    watched = Watched()
    for _ in range(3600):
        watched.pass_time(1)
        watched.of.offence("a", Reason.UNKNOWN_TASK, 10)
    assert not watched.bans


def test_offences_fade() -> None:
    watched = Watched()
    watched.of.offence("a", Reason.WRONG_PROMPT)
    watched.pass_time(HALF_LIFE)
    assert watched.of.score("a") == pytest.approx(-WEIGHTS[Reason.WRONG_PROMPT] / 2)
    for _ in range(100):
        watched.of.offence("a", Reason.WRONG_PROMPT)
        watched.pass_time(2 * HALF_LIFE)
    assert not watched.bans


def test_bans_grow_and_are_forgiven_after_long_good_behaviour() -> None:
    watched = Watched()
    for expected in (*BANS, BANS[-1]):
        assert watched.ban("a") == expected
        watched.pass_time(expected)
        assert watched.of.banned("a") == 0
    assert watched.bans == ["a"] * 5
    watched.pass_time(len(BANS) * DAY)
    assert watched.ban("a") == BANS[0]


def test_who_comes_back_from_a_ban_has_less_to_lose() -> None:
    watched = Watched()
    watched.ban("a")
    watched.pass_time(BANS[0])
    watched.of.offence("a", Reason.SIGNATURE)
    assert watched.of.banned("a") > 0


def test_nothing_is_added_during_a_ban() -> None:
    watched = Watched()
    watched.ban("a")
    for _ in range(100):
        watched.of.offence("a", Reason.SIGNATURE)
    assert watched.bans == ["a"]
    assert watched.of.banned("a") == BANS[0]


def test_credit_is_slow_and_bounded() -> None:
    watched = Watched()
    watched.of.credit("a", 10)
    assert 0 < watched.of.score("a") <= 1
    watched.of.credit("a", 10**6)
    assert watched.of.score("a") == MAX_CREDIT
    for _ in range(4):
        watched.of.offence("a", Reason.SCHEMA)
    assert watched.bans == ["a"]


def test_standings_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "reputation.json"
    watched = Watched(path)
    watched.ban("banned")
    watched.of.offence("bad", Reason.WRONG_PROMPT)
    watched.of.credit("good", 50)
    watched.of.save()
    again = Watched(path, watched.wall.time + 20)
    again.of.load()
    assert again.of.banned("banned") == pytest.approx(BANS[0] - 20)
    assert again.of.score("bad") == pytest.approx(-WEIGHTS[Reason.WRONG_PROMPT], rel=0.01)
    assert again.of.score("good") == pytest.approx(5, rel=0.01)
    assert [row.peer for row in again.of.standings()] == ["banned", "bad", "good"]
    assert again.bans == []
    again.pass_time(BANS[0])
    assert again.ban("banned") == BANS[1]


@pytest.mark.parametrize("jump", [-10 * 365 * DAY, 10 * 365 * DAY])
def test_a_clock_that_is_set_while_the_node_runs_changes_nothing(jump: float) -> None:
    watched = Watched()
    watched.ban("a")
    watched.wall.time += jump
    assert watched.of.banned("a") == BANS[0]
    watched.clock.time += BANS[0]
    assert watched.of.banned("a") == 0


def test_a_clock_set_back_between_two_runs_prolongs_no_ban(tmp_path: Path) -> None:
    path = tmp_path / "reputation.json"
    watched = Watched(path)
    watched.ban("a")
    watched.of.save()
    again = Watched(path, watched.wall.time - 10 * 365 * DAY)
    again.of.load()
    assert again.of.banned("a") == BANS[0]


def test_a_file_cannot_ban_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "reputation.json"
    entry = {"score": -50.0, "at": 1e12, "until": 1e12, "bans": 1}
    path.write_text(json.dumps({"version": 1, "saved": 1.8e9, "peers": {"a": entry}}))
    watched = Watched(path)
    watched.of.load()
    assert watched.of.banned("a") == BANS[-1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('"bans": 1', '"bans": -1'),
        lambda text: text.replace("-50.0", "NaN"),
        lambda text: text.replace('"bans"', '"sins"'),
        lambda text: "\udcff" + text,
    ],
)
def test_a_damaged_file_is_put_aside_and_said(tmp_path: Path, damage: Callable[[str], str]) -> None:
    path = tmp_path / "reputation.json"
    watched = Watched(path)
    watched.ban("a")
    watched.of.save()
    path.write_bytes(damage(path.read_text()).encode(errors="surrogateescape"))
    again = Watched(path)
    again.of.load()
    assert again.of.standings() == []
    assert "strangers again" in again.said[0]
    assert not path.exists()
    assert (tmp_path / "reputation.json.damaged").exists()
    again.of.save()
    assert path.exists()


def test_a_missing_file_is_nothing_to_speak_of(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "reputation.json")
    watched.of.load()
    assert watched.said == []


def test_peers_are_bounded_and_bans_outlast_strangers(tmp_path: Path) -> None:
    path = tmp_path / "reputation.json"
    watched = Watched(path)
    watched.ban("bad")
    watched.of.offence("odd", Reason.SCHEMA)
    for number in range(2 * MAX_PEERS):
        watched.of.credit(f"peer {number}", 1)
    watched.of.save()
    assert len(watched.of.standings()) <= MAX_PEERS
    again = Watched(path)
    again.of.load()
    assert len(again.of.standings()) <= MAX_PEERS
    assert again.of.banned("bad") > 0
    assert again.of.score("odd") < -30


def test_what_is_admitted_during_a_ban_makes_nobody_better() -> None:
    watched = Watched()
    ban = watched.ban("a")
    watched.pass_time(ban / 2)
    watched.of.credit("a", 100)
    watched.pass_time(ban / 2)
    assert watched.of.banned("a") == 0
    assert watched.of.score("a") == AFTER_BAN
