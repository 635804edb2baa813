"""The redial loop, on a network that is made up and a clock that jumps."""

import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from p2p.addresses import Address, parse_address
from p2p.discovery import CHOSEN, DIALS, SHARD_TARGET, TARGET, Finder
from p2p.gossip import shard_of, shards_heard, topic_of
from p2p.ids import peer_id_of
from p2p.joins import system_resolve
from p2p.peerbook import PeerBook
from p2p.settings import NetworkSettings
from p2p.transport import Connection, TransportError


def peer(number: int) -> str:
    return peer_id_of(number.to_bytes(32, "big"))


def base(number: int) -> str:
    return f"/ip4/10.0.{number // 256}.{number % 256}/tcp/4747"


def full(number: int) -> str:
    return f"{base(number)}/p2p/{peer(number)}"


OWN = 999
SHARDS = 20


class Net:
    """A transport whose peers are reachable, or not, as a test says. Unreachable ones take a dial's time to fail."""

    def __init__(self, clock: MockClock) -> None:
        self.peer_id = peer(OWN)
        self.clock = clock
        self.up: dict[str, str] = {}
        """Base address -> peer that answers there."""
        self.silent = False
        self.deaf: set[str] = set()
        self.came: set[str] = set()
        """Peers that have dialled this node."""
        self.lost_packets: set[str] = set()
        """Base addresses at which nobody says no."""
        self.slams: set[str] = set()
        """Peers that close every connection at once."""
        self.dials: list[tuple[float, str]] = []
        self.open: dict[str, tuple[str, float]] = {}
        self.running = self.most = 0

    def now(self) -> float:
        return 1.7e9 + self.clock.current_time()

    def connections(self) -> list[Connection]:
        return [
            Connection(peer, address, peer not in self.came, trio.current_time() - since)
            for peer, (address, since) in self.open.items()
        ]

    async def connect(self, address: str) -> str:
        self.dials.append((trio.current_time(), address))
        parsed = parse_address(address)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await trio.sleep(100 if self.silent or parsed.base in self.lost_packets else 0.05)
        finally:
            self.running -= 1
        answers = self.up.get(parsed.base)
        if answers is None:
            raise TransportError("connection refused")
        if parsed.peer not in (None, answers):
            raise TransportError("somebody else is there")
        if answers != self.peer_id and answers not in self.slams:
            self.open.setdefault(answers, (parsed.base, trio.current_time()))
        return answers

    async def disconnect(self, peer: str) -> None:
        self.open.pop(peer, None)

    def subscribers(self, topic: str) -> list[str]:
        """Each peer that is connected listens to its own shard and the next, unless it is deaf."""
        shards = {peer: shards_heard(peer, SHARDS, 2) for peer in self.open if peer not in self.deaf}
        return [peer for peer, heard in shards.items() if topic in [topic_of("main", shard) for shard in heard]]

    def lose(self, *numbers: int) -> None:
        for number in numbers:
            self.open.pop(peer(number), None)

    def comes(self, *peers: str) -> None:
        """Peers dial this node."""
        self.came.update(peers)
        self.open.update((peer, ("/ip4/10.9.9.9/tcp/1", trio.current_time())) for peer in peers)

    def times(self, number: int, since: float = 0.0) -> list[float]:
        return [
            when - since for when, address in self.dials if address.startswith(f"{base(number)}/") and when >= since
        ]


class Said(list[str]):
    def __call__(self, level: str, text: str) -> None:
        self.append(f"{level}: {text}")


class Case:
    """A finder on a made-up network."""

    def __init__(self, clock: MockClock, book: Path | None = None) -> None:
        self.net = Net(clock)
        self.said = Said()
        self.book = PeerBook(book, self.said, self.net.now)
        self.banned: set[str] = set()
        self.names: dict[str, list[int]] = {}
        self.asked = 0

    async def resolve(self, address: Address) -> Sequence[Address]:
        self.asked += 1
        if address.host not in self.names:
            raise OSError(-2, "Name or service not known")
        return [address.at(base(number).split("/")[2]) for number in self.names[address.host]]

    def finder(self, settings: NetworkSettings, now: Callable[[], float] | None = None) -> Finder:
        return Finder(
            self.net,  # type: ignore[arg-type]
            settings,
            self.book,
            self.said,
            self.banned.__contains__,
            self.resolve,
            now or self.net.now,
            random.Random(1),
        )

    @asynccontextmanager
    async def running(self, *join: str, **more: object) -> AsyncIterator[Finder]:
        finder = self.finder(NetworkSettings.model_validate({"join": join, **more}))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(finder.run)
            yield finder
            nursery.cancel_scope.cancel()


async def test_an_address_to_join_is_tried_for_ever_but_less_often_and_said_once(
    autojump_clock: MockClock,
) -> None:
    case = Case(autojump_clock)
    async with case.running(full(1)):
        await trio.sleep(3600)
        times = case.net.times(1)
        pauses = [after - before for before, after in itertools.pairwise(times)]
        assert pauses[0] < 3
        assert all(40 < pause < 80 for pause in pauses[-20:])
        case.net.up[base(1)] = peer(1)
        await trio.sleep(80)
        assert peer(1) in case.net.open
    assert sum("does not answer" in text for text in case.said) == 1
    assert sum("goes on alone" in text for text in case.said) == 1
    assert case.said[-1] == "info: no longer alone: 1 connected"


async def test_a_lost_node_is_dialled_within_seconds_however_long_it_was_away(autojump_clock: MockClock) -> None:
    case = Case(autojump_clock)
    case.net.up[base(1)] = peer(1)
    async with case.running(full(1)):
        await trio.sleep(60)
        del case.net.up[base(1)]
        case.net.lose(1)
        await trio.sleep(600)
        case.net.up[base(1)] = peer(1)
        await trio.sleep(7)
        assert peer(1) in case.net.open


@pytest.mark.parametrize("size", [3, 12])
async def test_two_halves_of_a_swarm_meet_again_soon_after_a_minute_apart(autojump_clock: MockClock, size: int) -> None:
    """Also where each half has connections enough: 12 is more than the target."""
    case = Case(autojump_clock)
    ours, theirs = range(size), range(100, 100 + size)
    case.net.up = {base(number): peer(number) for number in (*ours, *theirs)}
    async with case.running(*(full(number) for number in ours)) as finder:
        for number in theirs:
            finder.found(full(number), "mdns")
            await case.net.connect(full(number))
        await trio.sleep(30)
        cut = {base(number): case.net.up.pop(base(number)) for number in theirs}
        case.net.lose(*theirs)
        await trio.sleep(60)
        case.net.up.update(cut)
        await trio.sleep(10)
        assert any(peer(number) in case.net.open for number in theirs)


async def test_a_cut_that_swallows_packets_is_survived_too(autojump_clock: MockClock) -> None:
    case = Case(autojump_clock)
    case.net.up[base(1)] = peer(1)
    async with case.running(full(1)):
        await trio.sleep(30)
        case.net.silent = True
        case.net.lose(1)
        await trio.sleep(60)
        case.net.silent = False
        await trio.sleep(12)
        assert peer(1) in case.net.open


async def test_remembered_nodes_are_dialled_at_the_start_a_few_at_once(
    autojump_clock: MockClock,
) -> None:
    case = Case(autojump_clock)
    for number in range(200):
        case.book.reached(parse_address(full(number)))
        case.book.met(peer(number))
    case.net.silent = True
    async with case.running():
        await trio.sleep(20)
        assert case.net.most == DIALS
        case.net.silent = False
        case.net.up = {base(number): peer(number) for number in range(200)}
        await trio.sleep(15)
        assert len(case.net.open) == TARGET


async def test_no_more_connections_than_are_allowed_are_looked_for(autojump_clock: MockClock) -> None:
    case = Case(autojump_clock)
    case.net.up = {base(number): peer(number) for number in range(20)}
    async with case.running(*(full(number) for number in range(20)), max_peers=3):
        await trio.sleep(100)
        assert len(case.net.open) == 3


async def test_a_banned_node_a_stranger_and_this_node_are_not_dialled(autojump_clock: MockClock) -> None:
    case = Case(autojump_clock)
    case.net.up = {base(number): peer(number) for number in (1, 2, 3)}
    case.banned.add(peer(1))
    async with case.running(full(1), full(2), full(OWN), allow=[peer(1), peer(3)]) as finder:
        for number in (1, 2, 3, OWN):
            finder.found(full(number), "dht")
        await trio.sleep(100)
        assert {address for _, address in case.net.dials} == {full(3)}
        case.banned.clear()
        await trio.sleep(60)
        assert peer(1) in case.net.open


async def test_a_banned_node_that_answers_where_another_was_looked_for_is_let_go(autojump_clock: MockClock) -> None:
    case = Case(autojump_clock)
    case.net.up[base(1)] = peer(1)
    case.banned.add(peer(1))
    async with case.running(base(1)):
        await trio.sleep(10)
        assert case.net.dials
        assert peer(1) not in case.net.open
        assert peer(1) not in case.book


async def test_what_is_told_is_dialled_and_forgotten_if_it_never_answers(
    autojump_clock: MockClock,
) -> None:
    case = Case(autojump_clock)
    case.net.up[base(1)] = peer(1)
    async with case.running() as finder:
        finder.found(full(1), "mdns")
        finder.found(full(2), "dht")
        finder.found("nonsense", "dht")
        await trio.sleep(2)
        assert peer(1) in case.net.open
        await trio.sleep(3600)
        assert peer(2) not in case.book
        assert len(case.net.times(2)) < 10


async def test_a_node_that_closes_every_connection_is_not_dialled_every_second(autojump_clock: MockClock) -> None:
    case = Case(autojump_clock)
    case.net.up[base(1)] = peer(1)
    case.net.slams.add(peer(1))
    async with case.running(full(1)) as finder:
        finder.found(full(1), "mdns")
        await trio.sleep(600)
        assert len(case.net.times(1)) < 40


async def test_a_long_dead_node_is_forgotten(autojump_clock: MockClock) -> None:
    case = Case(autojump_clock)
    case.book.reached(parse_address(full(1)))
    case.book.met(peer(1))
    known = case.book.get(peer(1))
    assert known is not None
    known.met -= 40 * 86400
    async with case.running():
        await trio.sleep(3600)
        assert peer(1) not in case.book


async def test_a_name_is_resolved_anew_at_every_try_and_needs_no_peer_id(autojump_clock: MockClock) -> None:
    case = Case(autojump_clock)
    case.names["node"] = [1]
    async with case.running("/dns4/node/tcp/4747"):
        await trio.sleep(30)
        case.names["node"] = [2]
        case.net.up[base(2)] = peer(2)
        await trio.sleep(60)
        assert list(case.net.open) == [peer(2)]
        assert case.asked > 2
        # The container is replaced by another, elsewhere.
        case.net.up = {base(3): peer(3)}
        case.names["node"] = [3]
        case.net.lose(2)
        await trio.sleep(10)
        assert list(case.net.open) == [peer(3)]


async def test_every_machine_behind_a_name_is_tried_and_this_one_is_passed_over(autojump_clock: MockClock) -> None:
    case = Case(autojump_clock)
    case.names["node"] = [1, 2, OWN, 3]
    case.net.up = {base(number): peer(number) for number in (1, 2, OWN, 3)}
    async with case.running("/dns4/node/tcp/4747"):
        await trio.sleep(5)
        assert set(case.net.open) == {peer(1), peer(2), peer(3)}
        assert peer(OWN) not in case.book


async def test_who_took_over_the_address_of_a_node_that_moved_is_found(autojump_clock: MockClock) -> None:
    case = Case(autojump_clock)
    case.net.up = {base(1): peer(1), base(2): peer(2)}
    case.names = {"swarm.example.org": [1, 2]}
    async with case.running("/dns4/swarm.example.org/tcp/4747"):
        await trio.sleep(10)
        # The second is gone, comes back from elsewhere by itself, and a third has its address now.
        case.net.lose(2)
        case.names.clear()
        await trio.sleep(2)
        case.net.open[peer(2)] = (base(3), trio.current_time())
        case.net.up = {base(1): peer(1), base(2): peer(3), base(3): peer(2)}
        case.names = {"swarm.example.org": [1, 2, 3]}
        await trio.sleep(120)
        assert set(case.net.open) == {peer(1), peer(2), peer(3)}


async def test_who_took_over_this_nodes_own_address_is_found(autojump_clock: MockClock) -> None:
    case = Case(autojump_clock)
    case.net.up = {base(1): peer(1), base(2): peer(OWN)}
    case.names = {"swarm.example.org": [1, 2]}
    async with case.running("/dns4/swarm.example.org/tcp/4747"):
        await trio.sleep(10)
        case.net.lose(1)
        case.net.up = {base(2): peer(2), base(3): peer(OWN)}
        case.names = {"swarm.example.org": [2, 3]}
        await trio.sleep(120)
        assert set(case.net.open) == {peer(2)}


async def test_an_unknown_name_is_said_and_tried_on(autojump_clock: MockClock) -> None:
    case = Case(autojump_clock)
    async with case.running(f"/dns4/node/tcp/4747/p2p/{peer(1)}"):
        await trio.sleep(10)
        assert any("cannot be resolved" in text for text in case.said)
        case.names["node"] = [1]
        case.net.up[base(1)] = peer(1)
        await trio.sleep(20)
        assert peer(1) in case.net.open


def of_shard(peers: Iterable[str], shard: int) -> list[str]:
    return [peer for peer in peers if shard_of(peer, SHARDS) == shard]


@asynccontextmanager
async def among_many(clock: MockClock, **settings: object) -> AsyncIterator[Case]:
    """A node that has heard of 300 others, all of which answer."""
    case = Case(clock)
    case.net.up = {base(number): peer(number) for number in range(300)}
    async with case.running(**settings) as finder:
        for number in range(300):
            finder.found(full(number), "dht")
        yield case


async def test_nodes_of_each_shard_that_is_heard_are_looked_for(autojump_clock: MockClock) -> None:
    async with among_many(autojump_clock, shards=SHARDS, subscribe=2) as case:
        await trio.sleep(120)
        heard = shards_heard(peer(OWN), SHARDS, 2)
        assert all(len(of_shard(case.net.open, shard)) >= SHARD_TARGET for shard in heard)
        assert len(case.net.open) <= TARGET + 2 * SHARD_TARGET
        gone = of_shard(case.net.open, heard[1])[:4]
        for one in gone:
            case.net.up = {address: who for address, who in case.net.up.items() if who != one}
            del case.net.open[one]
        await trio.sleep(60)
        assert len(of_shard(case.net.open, heard[1])) >= SHARD_TARGET


async def test_nodes_that_do_not_hear_their_own_shard_do_not_take_all_connections(autojump_clock: MockClock) -> None:
    async with among_many(autojump_clock, shards=SHARDS, subscribe=1) as case:
        case.net.deaf = {*case.net.up.values()}
        [own] = shards_heard(peer(OWN), SHARDS, 1)
        assert len(of_shard(case.net.up.values(), own)) > 2 * SHARD_TARGET
        await trio.sleep(600)
        assert SHARD_TARGET < len(of_shard(case.net.open, own)) <= 2 * SHARD_TARGET


@pytest.mark.parametrize("deaf", [True, False])
async def test_those_that_come_by_themselves_do_not_keep_a_node_from_looking(
    autojump_clock: MockClock, deaf: bool
) -> None:
    """A dozen keys of one shard are made in a moment."""
    case = Case(autojump_clock)
    case.net.up = {base(number): peer(number) for number in range(300)}
    [own] = shards_heard(peer(OWN), SHARDS, 1)
    strangers = of_shard((peer(number) for number in range(1000, 3000)), own)[:12]
    async with case.running(shards=SHARDS, subscribe=1) as finder:
        case.net.comes(*strangers)
        case.net.deaf.update(strangers if deaf else ())
        await trio.sleep(10)
        for number in range(300):
            finder.found(full(number), "dht")
        await trio.sleep(120)
        assert len(of_shard(case.net.open.keys() - {*strangers}, own)) >= 3


async def test_those_that_come_by_themselves_are_not_all_that_a_node_knows(autojump_clock: MockClock) -> None:
    case = Case(autojump_clock)
    case.net.up = {base(number): peer(number) for number in range(20)}
    async with case.running() as finder:
        case.net.comes(*(peer(number) for number in range(1000, 1000 + TARGET)))
        await trio.sleep(10)
        for number in range(20):
            finder.found(full(number), "dht")
        await trio.sleep(60)
        assert len(case.net.open) == TARGET + CHOSEN


async def test_nodes_that_leave_silent_addresses_do_not_take_the_turns_of_others(autojump_clock: MockClock) -> None:
    """They were met later than the honest ones, and a dial of one holds its place for as long as it can."""
    case = Case(autojump_clock)
    honest, others = range(100, 106), range(200, 230)
    case.net.up = {base(number): peer(number) for number in honest}
    async with case.running() as finder:
        for number in honest:
            finder.found(full(number), "dht")
        await trio.sleep(30)
        case.net.comes(*(peer(number) for number in others))
        for number, last in itertools.product(others, range(8)):
            place = f"/ip4/192.0.2.{last}/tcp/{number}"
            case.net.lost_packets.add(place)
            finder.found(f"{place}/p2p/{peer(number)}", "identify")
        await trio.sleep(20)
        case.net.lose(*honest, *others)
        await trio.sleep(180)
        assert {*case.net.open} == {peer(number) for number in honest}


async def test_all_addresses_of_a_node_are_tried(autojump_clock: MockClock) -> None:
    case = Case(autojump_clock)
    case.net.up = {base(1): peer(1)}
    async with case.running() as finder:
        for number in (1, *range(10, 17)):
            finder.found(f"{base(number)}/p2p/{peer(1)}", "dht")
        await trio.sleep(60)
        assert peer(1) in case.net.open


async def test_without_shards_connections_are_looked_for_up_to_the_target(autojump_clock: MockClock) -> None:
    async with among_many(autojump_clock) as case:
        await trio.sleep(120)
        assert len(case.net.open) == TARGET


async def test_after_a_stall_everything_is_tried_at_once(autojump_clock: MockClock) -> None:
    case = Case(autojump_clock)
    offset = 0.0
    finder = case.finder(NetworkSettings(join=[full(1)]), lambda: case.net.now() + offset)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(finder.run)
        await trio.sleep(500)
        offset = 30.0  # the machine slept: only the clock on the wall has moved
        since = trio.current_time()
        case.net.up[base(1)] = peer(1)
        await trio.sleep(3)
        assert case.net.times(1, since)
        assert peer(1) in case.net.open
        nursery.cancel_scope.cancel()


async def test_the_book_is_kept_on_disk_and_after_the_end(autojump_clock: MockClock, tmp_path: Path) -> None:
    case = Case(autojump_clock, tmp_path / "peers.json")
    case.net.up = {base(number): peer(number) for number in (1, 2)}
    async with case.running(full(1)) as finder:
        await trio.sleep(30)
        finder.found(full(2), "mdns")
        await trio.sleep(30)
    again = Case(autojump_clock, tmp_path / "peers.json")
    again.book.load()
    again.net.up = case.net.up
    async with again.running():
        await trio.sleep(5)
        assert set(again.net.open) == {peer(1), peer(2)}


async def test_the_system_resolves_a_name() -> None:
    with trio.fail_after(20):
        found = await system_resolve(parse_address("/dns4/localhost/tcp/4747"))
    assert [str(address) for address in found] == ["/ip4/127.0.0.1/tcp/4747"]
