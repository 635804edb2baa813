"""Catch-up between nodes with real admission, and against peers that cheat."""

import random
from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio
from trio.testing import MockClock

from p2p import catchup, serving
from p2p.admission import Admission
from p2p.canonical import encode
from p2p.catchup import CatchUp
from p2p.memory import MemoryNetwork, MemoryStream
from p2p.reputation import Reputation
from p2p.serving import PROTOCOL, get_frame, list_frame, parse_have, parse_list
from p2p.settings import AdmissionSettings
from p2p.store import EnvelopeStore
from p2p.transport import Stream, TransportError
from p2p.wire import Envelope, seal
from tests.p2p.fakes import FakePool, FakeTasks, numbers
from tests.p2p.forging import NOW, batch, group, key, peer
from tests.p2p.test_memory import Log

INDICES = numbers()(400)


def envelopes(number: int, count: int, first: int = 0) -> list[Envelope]:
    """Good ones of one origin."""
    return [
        seal(key(number), batch(place + 1, [group(INDICES[place])], created=NOW))
        for place in range(first, first + count)
    ]


class Node:
    """Catch-up, admission and a store; no gossip, so that nothing comes another way."""

    def __init__(self, network: MemoryNetwork, number: int, seconds: float = 0.0, every: float = 1e6) -> None:
        self.offences: list[tuple[str, str]] = []
        self.pool = FakePool()
        self.transport = network.join(peer(number), self)
        self.store = EnvelopeStore()
        self.reputation = Reputation(None, lambda peer: None, clock=trio.current_time)
        self.admission = Admission(
            AdmissionSettings(),
            "main",
            peer(number),
            [],
            FakeTasks(seconds),
            self.pool,
            self.reputation,
            lambda: 1,
            lambda: NOW,
            on_accepted=self.store.add,
        )
        self.catch_up = CatchUp(
            self.transport,
            self.store,
            self.admission,
            self.misbehaved,
            every=every,
            rng=random.Random(number),
            now=lambda: 0.0,
        )
        self.catch_up.serve()

    def connected(self, peer: str) -> None:
        self.catch_up.connected(peer)

    def disconnected(self, peer: str) -> None:
        self.catch_up.disconnected(peer)

    def misbehaved(self, peer: str, what: str) -> None:
        self.offences.append((peer, what))

    def run(self, nursery: trio.Nursery) -> "Node":
        nursery.start_soon(self.admission.run)
        nursery.start_soon(self.catch_up.run)
        return self

    def keep(self, made: Sequence[Envelope]) -> None:
        for one in made:
            self.store.add(one)

    def ids(self) -> list[bytes]:
        """Oldest first."""
        return [id_ for id_, _ in self.store.recent(1e6, 10**6, lambda origin: True)][::-1]


async def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Returns when it is true, and fails after so many seconds (of the clock in use)."""
    with trio.fail_after(seconds):
        while not true():
            await trio.sleep(0.05)


async def test_a_late_node_gets_all_that_came_before_it_oldest_first(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork(nursery)
    network.identify_seconds = 1.5
    first, late = Node(network, 1).run(nursery), Node(network, 2, seconds=0.01).run(nursery)
    # More than fit one origin's queue, than its burst, and than one request.
    made = envelopes(1, 300)
    first.keep(made)
    await trio.sleep(100)
    await late.transport.connect(first.transport.addresses()[0])
    await until(lambda: len(late.pool.groups) == 300)

    assert late.ids() == [one.id for one in made]
    assert late.catch_up.recovered == late.admission.counts.received == 300
    assert not late.admission.counts.rejected
    assert not late.offences
    assert not first.offences
    nursery.cancel_scope.cancel()


async def test_only_what_is_missing_is_asked_for(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    network = MemoryNetwork(nursery)
    first, second = Node(network, 1).run(nursery), Node(network, 2).run(nursery)
    made = envelopes(1, 40)
    first.keep(made)
    # The later half is known already, of which some was refused; and the second node's own came back to it.
    for one in made[20:]:
        second.admission.check(one.data, peer(3))
    first.keep(envelopes(2, 5))
    await second.transport.connect(first.transport.addresses()[0])
    await until(lambda: second.catch_up.recovered == 20)
    await trio.sleep(20)

    assert second.catch_up.recovered == 20
    assert second.admission.counts.received == 40
    assert second.admission.counts.duplicates == 0
    nursery.cancel_scope.cancel()


async def test_a_stall_is_noticed_and_repaired(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    network = MemoryNetwork(nursery)
    first, second = Node(network, 1).run(nursery), Node(network, 2).run(nursery)
    await second.transport.connect(first.transport.addresses()[0])
    await trio.sleep(20)
    first.keep(envelopes(1, 100))
    await trio.sleep(20)
    assert not second.pool.groups
    # Nothing ran for 30 seconds, as with SIGSTOP.
    autojump_clock.jump(30)
    await until(lambda: len(second.pool.groups) == 100, 3)
    nursery.cancel_scope.cancel()


async def test_a_sleep_of_the_machine_is_noticed_too(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    network = MemoryNetwork(nursery)
    first, second = Node(network, 1).run(nursery), Node(network, 2)
    wall = [0.0]
    second.catch_up = CatchUp(
        second.transport, second.store, second.admission, second.misbehaved, every=1e6, now=lambda: wall[0]
    )
    second.run(nursery)
    await second.transport.connect(first.transport.addresses()[0])
    await trio.sleep(20)
    first.keep(envelopes(1, 10))
    wall[0] = 3600.0
    await until(lambda: len(second.pool.groups) == 10, 3)
    nursery.cancel_scope.cancel()


async def test_what_gossip_loses_is_found_by_the_regular_visits(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork(nursery)
    nodes = [Node(network, number, every=30.0).run(nursery) for number in (1, 2, 3)]
    for one, other in ((0, 1), (1, 2)):
        await nodes[one].transport.connect(nodes[other].transport.addresses()[0])
    await trio.sleep(20)
    nodes[0].keep(envelopes(1, 10))
    # Over a neighbour, since the third does not know the first.
    await until(lambda: len(nodes[2].pool.groups) == 10, 150)
    nursery.cancel_scope.cancel()


async def test_a_second_visit_asks_only_for_what_came_since(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    network = MemoryNetwork(nursery)
    node, ages = Node(network, 1).run(nursery), list[int]()

    async def serve(stream: Stream) -> None:
        ages.append(parse_list(await stream.receive(4096))[0])
        await stream.send(encode(["have", b""]))

    other = network.join(peer(2), Log())
    other.serve(PROTOCOL, serve)
    await node.transport.connect(other.addresses()[0])
    await trio.sleep(100)
    await other.disconnect(peer(1))
    await other.connect(node.transport.addresses()[0])
    await trio.sleep(1)
    assert ages[0] == catchup.FIRST_AGE + 1
    assert ages[1] < 20  # the second look, 5 s later
    assert 100 <= ages[2] < 120
    nursery.cancel_scope.cancel()


async def test_only_the_shards_heard_are_asked_for(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    network = MemoryNetwork(nursery)
    node = Node(network, 1)
    for number in range(2, 12):
        node.keep(envelopes(number, 1))
    client = network.join(peer(2), Log())
    await client.connect(node.transport.addresses()[0])
    found = 0
    for shard in range(3):
        async with client.open(peer(1), PROTOCOL) as stream:
            await stream.send(list_frame(600, 3, [shard]))
            listed = parse_have(await stream.receive(10_000))
            assert isinstance(listed, list)
            assert len(listed) < 10
            found += len(listed)
    assert found == 10
    nursery.cancel_scope.cancel()


async def give(stream: Stream, made: Sequence[Envelope], answers: Callable[[int], Awaitable[bytes]]) -> None:
    """A server that lists what it should, and answers with anything."""
    await stream.receive(4096)
    entries = [one.id + len(one.data).to_bytes(4, "big") for one in made]
    await stream.send(encode(["have", b"".join(entries)]))
    await stream.receive(4096)
    for place in range(10**6):
        await stream.send(await answers(place))


async def now(data: bytes) -> bytes:
    return data


async def late(data: bytes) -> bytes:
    await trio.sleep(14)
    return data


MADE = envelopes(5, 40)
TAMPERED = MADE[0].data[:-1] + bytes([MADE[0].data[-1] ^ 1])


async def garbage_list(stream: Stream) -> None:
    await stream.send(random.Random(0).randbytes(500))


async def huge_list(stream: Stream) -> None:
    await stream.send(bytes(10 * 2**20))


async def endless_size(stream: Stream) -> None:
    await stream.send(encode(["have", bytes(32) + b"\xff" * 4]))


async def same_id_twice(stream: Stream) -> None:
    await stream.send(encode(["have", (bytes(32) + b"\0\0\0\1") * 2]))


async def huge_frame(stream: Stream) -> None:
    await give(stream, MADE, lambda place: now(bytes(10 * 2**20)))


async def unasked(stream: Stream) -> None:
    await give(stream, MADE[:20], lambda place: now(MADE[20 + place % 20].data))


async def repeated(stream: Stream) -> None:
    await give(stream, MADE, lambda place: now(MADE[-1].data))


async def tampered(stream: Stream) -> None:
    await give(stream, MADE, lambda place: now(TAMPERED))


async def silent(stream: Stream) -> None:
    await trio.sleep(3600)


async def dripping(stream: Stream) -> None:
    await give(stream, MADE, lambda place: late(MADE[place].data))


async def has_none_of_it(stream: Stream) -> None:
    await give(stream, MADE, lambda place: now(b""))


async def always_busy(stream: Stream) -> None:
    await stream.send(encode(["busy", 3600]))


@pytest.mark.parametrize(
    ("serve", "guilty"),
    [
        (garbage_list, True),
        (huge_list, True),
        (endless_size, True),
        (same_id_twice, True),
        (huge_frame, True),
        (unasked, True),
        (repeated, True),
        (tampered, True),
        (silent, False),
        (dripping, False),
        (has_none_of_it, False),
        (always_busy, False),
    ],
)
async def test_a_server_that_cheats_pays_and_holds_up_nobody(
    serve: Callable[[Stream], Awaitable[None]], guilty: bool, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork(nursery)
    node = Node(network, 1).run(nursery)
    cheat = network.join(peer(6), Log())
    cheat.serve(PROTOCOL, serve)
    await node.transport.connect(cheat.addresses()[0])
    await trio.sleep(0.5)
    honest = Node(network, 7).run(nursery)
    # The first of them are the very ones that the cheat pretends to have.
    honest.keep(MADE)
    honest.keep(envelopes(8, 10))
    await node.transport.connect(honest.transport.addresses()[0])

    await until(lambda: len(node.pool.groups) == 50, 60)
    assert (peer(6) in {who for who, _ in node.offences} or node.reputation.score(peer(6)) < 0) == guilty
    assert peer(7) not in {who for who, _ in node.offences}
    assert node.reputation.score(peer(7)) == 0
    nursery.cancel_scope.cancel()


async def ask(stream: MemoryStream, *frames: bytes) -> list[bytes]:
    """Send all, and read until the stream ends."""
    answers = []
    for frame in frames:
        await stream.send(frame)
    try:
        while True:
            answers.append(await stream.receive(2**20))
    except TransportError:
        return answers


async def _given(stream: MemoryStream, id_: bytes) -> bool:
    """Whether the envelope of this id is sent before the stream ends."""
    try:
        await stream.send(get_frame([id_]))
        return bool(await stream.receive(2**20))
    except TransportError:
        return False


LIST = list_frame(600, 1, [0])


@pytest.mark.parametrize(
    "frames",
    [
        [random.Random(0).randbytes(300)],
        [bytes(10 * 2**20)],
        [get_frame([MADE[0].id])],
        [encode(["list", 600, 1, []])],
        [encode(["list", 600, 1, [1]])],
        [encode(["list", 600, 1, [0] * 65])],
        [encode(["list", 600, 10**9, [0]])],
        [encode(["list", 10**6, 1, [0]])],
        [encode(["list", [[[[]]]], 1, [0]])],
        [encode(["list", True, 1, [0]])],
        [b"\x94\xd9\x04" + encode(["list", 600, 1, [0]])[2:]],
        [LIST, LIST],
        [LIST, get_frame([bytes(32)])],
        [LIST, get_frame([MADE[0].id, MADE[0].id])],
        [LIST, get_frame([MADE[0].id]), get_frame([MADE[0].id])],
        [LIST, get_frame([one.id for one in MADE[:33]])],
        [LIST, encode(["get", b""])],
    ],
)
async def test_a_client_that_cheats_pays(frames: list[bytes], nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    network = MemoryNetwork(nursery)
    node = Node(network, 1)
    node.keep(MADE)
    client = network.join(peer(6), Log())
    await client.connect(node.transport.addresses()[0])
    async with client.open(peer(1), PROTOCOL) as stream:
        await ask(stream, *frames)
    assert [who for who, _ in node.offences] == [peer(6)]
    nursery.cancel_scope.cancel()


async def test_a_client_gets_so_many_sessions_and_bytes_and_so_much_time(
    nursery: trio.Nursery, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = MemoryNetwork(nursery)
    node = Node(network, 1)
    node.keep(MADE)
    client = network.join(peer(6), Log())
    await client.connect(node.transport.addresses()[0])

    answers = []
    for _ in range(50):
        async with client.open(peer(1), PROTOCOL) as stream:
            await stream.send(LIST)
            answers.append(parse_have(await stream.receive(2**20)))
    assert sum(isinstance(answer, list) for answer in answers) == 12
    assert isinstance(answers[-1], float)
    await trio.sleep(60)

    # A third one beside two that stand open.
    async with client.open(peer(1), PROTOCOL) as one, client.open(peer(1), PROTOCOL) as two:
        for stream in (one, two):
            await stream.send(LIST)
            assert isinstance(parse_have(await stream.receive(2**20)), list)
        async with client.open(peer(1), PROTOCOL) as three:
            await three.send(LIST)
            assert isinstance(parse_have(await three.receive(2**20)), float)
        assert not node.offences
        # Whoever then says nothing is let go.
        begun = trio.current_time()
        assert await ask(one, get_frame([MADE[0].id])) == [MADE[0].data]
        assert trio.current_time() - begun <= 70

    # And so is whoever reads nothing.
    async with client.open(peer(1), PROTOCOL) as stream:
        await stream.send(LIST)
        await stream.receive(2**20)
        await stream.send(get_frame([one.id for one in MADE[:32]]))
        await trio.sleep(20)
        assert len(await ask(stream)) < 32

    # And whoever asks for one at a time, with pauses, when a session is over.
    await trio.sleep(60)
    async with client.open(peer(1), PROTOCOL) as stream:
        await stream.send(LIST)
        await stream.receive(2**20)
        given = 0
        while given < len(MADE) and await _given(stream, MADE[given].id):
            given += 1
            await trio.sleep(10)
        assert 1 <= given <= 7
    assert not node.offences

    monkeypatch.setattr(serving, "SESSION_BYTES", len(MADE[0].data) + 10)
    async with client.open(peer(1), PROTOCOL) as stream:
        answered = await ask(stream, LIST, get_frame([one.id for one in MADE[:3]]))
    assert answered[1:] == [MADE[0].data]
    nursery.cancel_scope.cancel()


async def test_more_than_a_session_holds_takes_several(
    nursery: trio.Nursery, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (serving, catchup):
        monkeypatch.setattr(module, "SESSION_COUNT", 50)
    network = MemoryNetwork(nursery)
    first, second = Node(network, 1).run(nursery), Node(network, 2).run(nursery)
    made = envelopes(1, 120)
    first.keep(made)
    await second.transport.connect(first.transport.addresses()[0])
    await until(lambda: len(second.pool.groups) == 120, 10)
    # The newest are worth the most.
    assert second.ids()[:50] == [one.id for one in made[70:]]
    assert not first.offences
    nursery.cancel_scope.cancel()


def test_the_store_is_bounded_and_one_origin_cannot_push_out_the_others() -> None:
    clock = [0.0]
    size = len(MADE[0].data)
    store = EnvelopeStore(max_bytes=40 * size + 1000, max_count=40, max_age=100, clock=lambda: clock[0])
    few = envelopes(9, 5)
    for one in (*few, *MADE):
        store.add(one)
    assert len(store) == 15
    assert all(one.id in store for one in (*few, *MADE[-10:]))
    for number in range(10, 20):
        for one in envelopes(number, 8):
            store.add(one)
    assert len(store) <= 40
    assert store.size <= 40 * size + 1000
    assert sum(one.id in store for one in few) >= 3
    held = store.recent(100, 5, lambda origin: origin != peer(19))
    assert len(held) == 5
    assert held[0][0] == envelopes(18, 8)[-1].id
    store.forget_origin(peer(9))
    assert not any(one.id in store for one in few)
    clock[0] = 101
    assert store.recent(1000, 5, lambda origin: True) == []
    assert len(store) == 0
    assert store.size == 0
