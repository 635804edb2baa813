"""The peer book: what is remembered, what is refused, and what happens to a file that is not one."""

import errno
from pathlib import Path

import pytest

from p2p.addresses import Address, parse_address
from p2p.ids import peer_id_of
from p2p.peerbook import MAX_ADDRESSES, MAX_PEERS, PeerBook


def peer(number: int) -> str:
    return peer_id_of(number.to_bytes(32, "big"))


def address(number: int, port: int = 4747) -> Address:
    return parse_address(f"/ip4/10.0.{number // 256}.{number % 256}/tcp/{port}/p2p/{peer(number)}")


class Clock:
    def __init__(self) -> None:
        self.time = 1.7e9

    def __call__(self) -> float:
        return self.time


class Said(list[tuple[str, str]]):
    def __call__(self, level: str, text: str) -> None:
        self.append((level, text))


def book(path: Path | None = None, clock: Clock | None = None, said: Said | None = None) -> PeerBook:
    return PeerBook(path, said if said is not None else Said(), clock or Clock())


def test_a_book_is_the_same_after_it_was_written_and_read(tmp_path: Path) -> None:
    path, clock = tmp_path / "peers.json", Clock()
    first = book(path, clock)
    first.reached(address(1))
    clock.time += 5
    first.met(peer(1))
    first.heard_of(address(2))
    first.failed(peer(2))
    first.save()
    second = book(path)
    second.load()
    assert second.peers() == first.peers()
    known = second.get(peer(1))
    assert known is not None
    assert (known.met, known.successes, known.addresses) == (clock.time, 1, [address(1)])
    assert path.stat().st_mode & 0o077 == 0


def test_nothing_is_written_when_nothing_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    kept = book(path)
    kept.save()
    assert not path.exists()
    kept.heard_of(address(1))
    kept.save()
    path.unlink()
    kept.heard_of(address(1))
    kept.save()
    assert not path.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00 not json",
        b'{"version": 2, "peers": []}',
        b'{"version": 1, "peers": [{"peer": "nobody", "heard": 1, "met": 1, "successes": 0, "failures": 0,'
        b' "addresses": []}]}',
        b'{"version": 1, "peers": [{"peer": "' + peer(1).encode() + b'", "heard": 1, "met": 1, "successes": 0,'
        b' "failures": 0, "addresses": ["/ip4/10.0.0.1/udp/1"]}]}',
        b'{"version": 1, "peers": [{"peer": "' + peer(1).encode() + b'", "heard": 1e999, "met": 1, "successes": 0,'
        b' "failures": 0, "addresses": []}]}',
    ],
)
def test_a_damaged_file_is_set_aside_and_said(tmp_path: Path, content: bytes) -> None:
    path, said = tmp_path / "peers.json", Said()
    path.write_bytes(content)
    damaged = book(path, said=said)
    damaged.load()
    assert len(damaged) == 0
    assert [level for level, _ in said] == ["warning"]
    assert (tmp_path / "peers.json.damaged").read_bytes() == content
    damaged.heard_of(address(1))
    damaged.save()
    assert path.exists()


def test_a_full_disk_is_a_warning_and_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said = tmp_path / "peers.json", Said()
    kept = book(path, said=said)
    kept.heard_of(address(1))
    kept.save()
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        kept.heard_of(address(2))
        kept.save()
        kept.save()
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["peers.json"]
    assert len(said) == 1
    kept.save()
    assert path.read_bytes() != before


def test_hearsay_never_pushes_out_a_node_that_was_met() -> None:
    full = book(clock=Clock())
    for number in range(10):
        full.reached(address(number))
        full.met(peer(number))
    for number in range(10, 3 * MAX_PEERS):
        full.heard_of(address(number))
    assert len(full) == MAX_PEERS
    assert all(peer(number) in full for number in range(10))


def test_a_node_that_was_met_enters_a_full_book_of_met_ones() -> None:
    clock = Clock()
    full = book(clock=clock)
    for number in range(MAX_PEERS):
        clock.time += 1
        full.reached(address(number))
        full.met(peer(number))
    full.heard_of(address(MAX_PEERS))
    assert peer(MAX_PEERS) not in full
    full.reached(address(MAX_PEERS + 1))
    assert peer(MAX_PEERS + 1) in full
    assert peer(0) not in full


def test_the_address_that_worked_stays_first_however_many_are_told() -> None:
    kept = book()
    kept.reached(address(1))
    kept.met(peer(1))
    for port in range(1, 50):
        kept.heard_of(address(1, port))
    known = kept.get(peer(1))
    assert known is not None
    assert known.addresses[0] == address(1)
    assert known.addresses[1] == address(1, 49)
    assert len(known.addresses) == MAX_ADDRESSES


def test_hearsay_never_pushes_out_what_a_peer_has_told_itself() -> None:
    kept = book()
    own = [parse_address(f"/ip4/{host}/tcp/4747/p2p/{peer(1)}") for host in ("198.51.100.7", "172.17.0.5")]
    for one in own:
        assert kept.heard_of(one, sure=True)
    kept.met(peer(1))
    for port in range(1, 100):
        assert kept.heard_of(address(1, port))
    known = kept.get(peer(1))
    assert known is not None
    assert {*own} < {*known.addresses}
    assert len(known.addresses) == MAX_ADDRESSES
    # A peer that tells ever more does not fill the book either, and one that has moved is found.
    for port in range(100, 200):
        assert kept.heard_of(address(1, port), sure=True)
        assert kept.heard_of(address(1, 1000 + port))
        assert address(1, port) in known.addresses
        assert address(1, 1000 + port) in known.addresses
    assert len(known.addresses) == MAX_ADDRESSES
    assert len(known.sure) <= MAX_ADDRESSES


def test_names_and_nameless_peers_are_not_kept() -> None:
    kept = book()
    assert not kept.heard_of(parse_address(f"/dns4/node/tcp/4747/p2p/{peer(1)}"))
    assert not kept.heard_of(parse_address("/ip4/10.0.0.1/tcp/4747"))
    assert not kept.heard_of(address(1, port=0))
    assert len(kept) == 0
