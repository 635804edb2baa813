"""`reputation.json`, as a node finds it at its start."""

from p2p.reasons import Reason
from p2p.reputation import BANS, MAX_CREDIT, Reputation
from tests.fuzz.scratch import directory
from tests.p2p.fakes import Clock
from tests.p2p.forging import peer

PATH = directory() / "reputation.json"
WALL, CLOCK = Clock(1.8e9), Clock(1000.0)


def _reputation(said: list[str]) -> Reputation:
    return Reputation(PATH, lambda peer: None, WALL, clock=CLOCK, say=lambda level, text: said.append(text))


def seeds() -> list[bytes]:
    of = _reputation([])
    empty = of.dump()
    of.offence(peer(1), Reason.SIGNATURE, 2)
    of.offence(peer(2), Reason.RATE)
    of.credit(peer(3), 7)
    return [empty, of.dump()]


def run(data: bytes) -> None:
    PATH.write_bytes(data)
    said: list[str] = []
    of = _reputation(said)
    of.load()
    for row in of.standings():
        assert row.score <= MAX_CREDIT
        assert 0 <= row.banned <= BANS[-1]
        of.offence(row.peer, Reason.SIGNATURE, 4)
        assert of.banned(row.peer) > 0
    PATH.write_bytes(of.dump())
    again = _reputation(said)
    again.load()
    assert {row.peer for row in again.standings()} == {row.peer for row in of.standings()}
