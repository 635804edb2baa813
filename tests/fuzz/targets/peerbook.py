"""`peers.json`, as a node finds it at its start."""

from p2p.addresses import parse_address
from p2p.peerbook import MAX_PEERS, PeerBook
from tests.fuzz.scratch import directory
from tests.p2p.forging import peer

PATH = directory() / "peers.json"


def seeds() -> list[bytes]:
    book = PeerBook(None, lambda level, text: None)
    empty = book.dump()
    for number in (1, 2):
        book.heard_of(parse_address(f"/ip4/203.0.113.{number}/tcp/4747/p2p/{peer(number)}"))
        book.reached(parse_address(f"/ip6/2001:db8::{number}/tcp/4747/p2p/{peer(number)}"))
        book.met(peer(number))
    return [empty, book.dump()]


def run(data: bytes) -> None:
    PATH.write_bytes(data)
    said: list[str] = []
    book = PeerBook(PATH, lambda level, text: said.append(text))
    book.load()
    assert len(book) <= MAX_PEERS
    if said:
        assert not len(book)
        return
    again = PeerBook(PATH, lambda level, text: said.append(text))
    PATH.write_bytes(book.dump())
    again.load()
    assert not said
    assert {one.peer for one in again.peers()} == {one.peer for one in book.peers()}
