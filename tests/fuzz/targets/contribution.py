"""`contribution.json`, as a node finds it at its start."""

from p2p.contribution import Contribution
from p2p.wire import Use
from tests.fuzz.scratch import directory
from tests.p2p.forging import peer

PATH = directory() / "contribution.json"


def seeds() -> list[bytes]:
    of = Contribution(None, peer(1))
    empty = of.dump()
    of.sent(7)
    of.admitted(peer(2), 3)
    of.trained({peer(2): 1, peer(3): 2**40})
    of.hear(peer(2), [Use(peer(1), 5, 4)])
    return [empty, of.dump()]


def run(data: bytes) -> None:
    PATH.write_bytes(data)
    of = Contribution(PATH, peer(1))
    of.load()
    of.sent(1)
    of.is_told(of.news())
    of.hear(peer(4), [Use(peer(1), 1, 1)])
    assert of.told().admitted_by > 0
    PATH.write_bytes(of.dump())
    again = Contribution(PATH, peer(1))
    again.load()
    assert again.told() == of.told()
