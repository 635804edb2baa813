"""Whole swarms in one process: everything but libp2p, over the network in memory."""

import dataclasses
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from p2p.gossip import topic_of
from p2p.memory import MemoryNetwork, MemoryTransport
from p2p.settings import AdmissionSettings, NetworkSettings
from p2p.swarm import Numbers, Swarm, Watcher, open_swarm
from p2p.transport import Verdict
from p2p.wire import seal
from rl.rollouts import Completion, RolloutGroup, ScoredGroup
from tests.p2p.fakes import FakePool, FakeTasks, numbers
from tests.p2p.forging import batch, key, peer, ref
from tests.p2p.test_memory import Log
from tests.rl.test_sapo import Surroundings
from verifiers.base import Task

INDICES = numbers()(1000)


def groups(first: int, count: int, answers: int = 2, config: str = ref().config) -> list[ScoredGroup]:
    """A round's own groups; which one is told by its place."""
    return [
        ScoredGroup(
            RolloutGroup(
                Task(ref(INDICES[place], config=config), "fake", f"question {INDICES[place]}", "right"),
                tuple(Completion("right" if n == 0 else f"wrong {n}", True) for n in range(answers)),
                1,
            ),
            "whoever",
            1,
            (1.0,) + (0.0,) * (answers - 1),
            (1.0,) + (-1.0,) * (answers - 1),
        )
        for place in range(first, first + count)
    ]


class Node:
    """What one swarm is opened with."""

    def __init__(
        self,
        network: MemoryNetwork,
        number: int,
        join: Sequence["Node"] = (),
        directory: Path | None = None,
        relay: bool = False,
    ) -> None:
        self.network = network
        self.number = number
        self.peer = peer(number)
        self.pool = FakePool()
        self.said: list[tuple[str, str]] = []
        self.join = [address for node in join for address in node.transport.addresses()]
        self.directory = directory
        self.relay = relay
        self.transport: MemoryTransport
        self.swarm: Swarm

    @asynccontextmanager
    async def open_transport(self, watcher: Watcher) -> AsyncIterator[MemoryTransport]:
        self.transport = self.network.join(self.peer, watcher)
        try:
            yield self.transport
        finally:
            self.network.leave(self.peer)

    def opened(self) -> AbstractAsyncContextManager[Swarm]:
        return open_swarm(
            self.open_transport,
            key(self.number),
            NetworkSettings(join=self.join),
            AdmissionSettings(),
            None if self.relay else FakeTasks(),
            None if self.relay else self.pool,
            round=lambda: 7,
            model="tiny",
            say=lambda level, text: self.said.append((level, text)),
            reputation_path=self.directory and self.directory / "reputation.json",
            contribution_path=self.directory and self.directory / "contribution.json",
            peers_path=self.directory and self.directory / "peers.json",
        )

    def got(self, origin: "Node") -> int:
        return len({one.group.task.prompt for one in self.pool.groups if one.origin == origin.peer})


@asynccontextmanager
async def swarm(network: MemoryNetwork, count: int) -> AsyncIterator[list[Node]]:
    """So many nodes, each joining the one before."""
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        for number in range(1, count + 1):
            nodes.append(node := Node(network, number, nodes[-1:]))
            node.swarm = await stack.enter_async_context(node.opened())
        for node in nodes[: count - 1]:
            await connected(node)
        yield nodes


async def connected(node: Node) -> None:
    """Until it has a peer."""
    with trio.fail_after(10):
        while not node.transport.connections():
            await trio.sleep(0.1)


async def test_two_nodes_share_what_they_sampled(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    async with swarm(MemoryNetwork(nursery), 2) as (first, second):
        await trio.sleep(1)
        assert await first.swarm.share(groups(0, 4), 1) == 1
        assert await second.swarm.share(groups(10, 70), 1) == 2
        assert await second.swarm.share([], 2) == 0
        await trio.sleep(1)
        assert second.got(first) == 4
        assert first.got(second) == 70
        assert {one.round for one in first.pool.groups} == {7}

        totals, status = first.swarm.totals(), first.swarm.status()
        assert (totals.peers, totals.batches_sent, totals.batches_received, totals.groups_admitted) == (1, 1, 2, 70)
        assert totals.rejected == {}
        assert (status.connected, status.mesh, status.sent, status.admitted, status.held) == (1, 1, 1, 70, 3)
        (row,) = status.peers
        assert (row.peer, row.connected, row.in_mesh, row.batches, row.groups) == (second.peer, True, True, 2, 70)
        assert row.score > 0
        assert row.rejected == {}
        assert json.loads(json.dumps(dataclasses.asdict(status)))["peer_id"] == first.peer


async def test_a_round_ends_while_what_others_sent_is_stuck_in_its_check(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async with swarm(MemoryNetwork(nursery), 2) as (first, second):
        await trio.sleep(1)
        for number in range(40):
            await second.swarm.share(groups(4 * number, 4, config="do hang"), number)
        while not first.swarm.status().waiting:
            await trio.sleep(0.1)
        around = Surroundings()
        # Of a clock that jumps ahead while a thread works.
        with trio.fail_after(3600):
            result = await around.sapo(swarm=first.swarm).round(1)
        assert (result.batches_sent, result.stats is None) == (1, False)
        assert first.swarm.status().waiting > 0
        assert first.pool.groups == [], "not one of them has passed"


async def test_a_relay_passes_on_what_others_send_and_keeps_it_for_those_who_missed_it(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork(nursery)
    relay = Node(network, 9, relay=True)
    one, other, late = (Node(network, number) for number in (1, 2, 3))
    async with AsyncExitStack() as stack:
        relay.swarm = await stack.enter_async_context(relay.opened())
        for node in (one, other, late):
            node.join = relay.transport.addresses()
        # Those behind it never reach each other.
        for pair in ((one, other), (one, late), (other, late)):
            network.cut(*(node.peer for node in pair))
        for node in (one, other):
            node.swarm = await stack.enter_async_context(node.opened())
            await connected(node)
        await trio.sleep(30)
        # At once: while a thread seals a batch, this clock runs on, and what is kept gets old.
        sent = await one.swarm.share(groups(0, 200), 1)
        await trio.sleep(10)
        assert other.got(one) == 200
        late.swarm = await stack.enter_async_context(late.opened())
        await trio.sleep(30)
        assert late.got(one) == 200
        status = relay.swarm.status()
        assert (status.received, status.held, status.waiting, status.rejected) == (sent, sent, 0, {})
        # What everybody checks, it checks: a flood gets no further, and garbage bans.
        cheat = network.join(peer(8), Log())
        await cheat.connect(relay.transport.addresses()[0])
        for number in range(20):
            await cheat.publish(topic_of("main", 0), b"garbage %d" % number)
        assert cheat.peer_id in relay.transport.blocked


async def test_it_says_once_that_it_is_alone_and_once_that_it_is_not(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork(nursery)
    alone = Node(network, 1)
    async with alone.opened() as alone.swarm:
        assert await alone.swarm.wait_for_peers(1, 60) == 0  # nobody comes, and it does not wait for ever
        # It trains on meanwhile, and shares with whoever comes.
        assert await alone.swarm.share(groups(0, 3), 1) == 1
        assert [level for level, _ in alone.said] == ["info"]
        assert "alone" in alone.said[0][1]
        late = Node(network, 2, [alone])
        async with late.opened() as late.swarm:
            assert await late.swarm.wait_for_peers(1, 10) == 1
            await trio.sleep(10)
            assert late.got(alone) == 3
            assert late.swarm.status().recovered == 1
            assert len(alone.said) == 2


async def test_nodes_wait_for_those_that_are_ready_to_begin(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    begun: dict[int, tuple[float, int]] = {}

    async def begin(node: Node, after: float) -> None:
        await trio.sleep(after)
        ready = await node.swarm.wait_for_peers(2, 60)
        begun[node.number] = (trio.current_time(), ready)

    async with swarm(MemoryNetwork(nursery), 3) as nodes:
        # The first joined nobody and the second joined it: all know each other only once they are introduced.
        await nodes[0].transport.connect(nodes[2].transport.addresses()[0])
        async with trio.open_nursery() as waiting:
            for node, after in zip(nodes, (0, 5, 10), strict=True):
                waiting.start_soon(begin, node, after)
        assert {ready for _, ready in begun.values()} == {2}
        assert all(10 <= at < 11 for at, _ in begun.values())


async def test_a_partition_heals_and_both_sides_get_what_they_missed(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork(nursery)
    async with swarm(network, 4) as nodes:
        # Connections that have stood for a while are looked for again.
        await trio.sleep(30)
        pairs = [(one, other) for one in nodes[:2] for other in nodes[2:]]
        for one, other in pairs:
            network.cut(one.peer, other.peer)
        for number in range(6):
            for place, node in enumerate(nodes):
                await node.swarm.share(groups(100 * place + 5 * number, 5), number)
            await trio.sleep(10)
        assert nodes[0].got(nodes[1]) == 30
        assert nodes[0].got(nodes[2]) == 0
        for one, other in pairs:
            network.heal(one.peer, other.peer)
        await trio.sleep(15)
        await nodes[3].swarm.share(groups(400, 5), 7)
        await trio.sleep(1)
        # What is new comes to all. What was missed comes to those that met again, and to others with a regular visit.
        assert min(nodes[0].got(nodes[3]), nodes[1].got(nodes[3])) >= 5
        assert max(nodes[0].got(nodes[3]), nodes[1].got(nodes[3])) == 35
        await trio.sleep(75)
        for node in nodes:
            assert [node.got(other) for other in nodes if other is not node] == [
                35 if other is nodes[3] else 30 for other in nodes if other is not node
            ]
            assert node.swarm.totals().rejected == {}


async def test_nothing_is_lost_over_a_bad_network(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    network = MemoryNetwork(nursery)
    async with swarm(network, 2) as (first, second):
        network.drop_every = 2
        # Of many answers, so that a round is several batches.
        for number in range(6):
            await first.swarm.share(groups(40 * number, 40, answers=32), number)
        sent = first.swarm.totals().batches_sent + first.swarm.status().unsent
        await trio.sleep(90)
        assert first.swarm.totals().batches_sent >= sent
        assert second.got(first) == 240
        assert second.swarm.totals().rejected == {}


async def test_a_node_that_returns_is_given_what_was_missed_meanwhile(
    nursery: trio.Nursery, autojump_clock: MockClock, tmp_path: Path
) -> None:
    network = MemoryNetwork(nursery)
    async with swarm(network, 1 + 1) as (first, _):
        node = Node(network, 3, [first], tmp_path)
        async with node.opened() as node.swarm:
            await connected(node)
            await node.swarm.share(groups(500, 5), 1)
            await trio.sleep(10)
        await first.swarm.share(groups(0, 5), 1)
        # The port may be another one: the book holds the nodes that were met, none need be told again.
        node.join = []
        async with node.opened() as node.swarm:
            await trio.sleep(10)
            assert node.got(first) == 5
            assert node.swarm.totals().rejected == {}
            assert node.swarm.totals().batches_received == 1


async def test_a_ban_blocks_a_peer_outlasts_a_restart_and_is_lifted(
    nursery: trio.Nursery, autojump_clock: MockClock, tmp_path: Path
) -> None:
    network = MemoryNetwork(nursery)
    cheat = network.join(peer(9), Log())
    topic = topic_of("main", 0)
    await cheat.subscribe(topic, lambda _, __: Verdict.IGNORE, lambda _, __: None)
    victim = Node(network, 1, directory=tmp_path)

    async with victim.opened() as victim.swarm:
        await cheat.connect(victim.transport.addresses()[0])
        # One that is in order, so that there is something to forget.
        await cheat.publish(topic, seal(key(9), batch(1, created=victim.swarm._now())).data)
        assert victim.swarm.status().held == 1
        for number in range(20):
            await cheat.publish(topic, b"garbage %d" % number)
        assert not cheat.connections()
        assert cheat.peer_id in victim.transport.blocked
        status = victim.swarm.status()
        assert status.held == 0
        (row,) = status.peers
        assert row.banned_seconds > 50
        assert row.score < 0
        assert row.rejected["decode"] >= 3
        assert sum(status.rejected.values()) == sum(row.rejected.values())

    async with victim.opened() as victim.swarm:
        assert cheat.peer_id in victim.transport.blocked
        await trio.sleep(70)
        assert cheat.peer_id not in victim.transport.blocked
        await cheat.connect(victim.transport.addresses()[0])
        await connected(victim)


async def test_what_breaks_the_protocol_below_counts_and_bans(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    node = Node(MemoryNetwork(nursery), 1)
    async with node.opened() as node.swarm:
        for _ in range(8):
            node.transport.observer.misbehaved(peer(9), "garbage for protobuf")
        assert node.swarm.totals().rejected["protocol"] >= 4
        assert peer(9) in node.transport.blocked
    # The network is open a moment longer than the swarm.
    node.transport.observer.misbehaved(peer(9), "once more")


class BrokenPool(FakePool):
    """A disk that is full, in the end."""

    async def add(self, groups: Sequence[ScoredGroup]) -> None:
        raise LookupError("no pool")


async def test_faults_of_this_node_come_out_as_themselves(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    network = MemoryNetwork(nursery)
    async with swarm(network, 2) as (first, _):
        node = Node(network, 3, [first])
        node.pool = BrokenPool()

        async def receive() -> None:
            async with node.opened() as node.swarm:
                await first.swarm.share(groups(0, 2), 1)
                await trio.sleep(30)

        async def fail() -> None:
            async with node.opened():
                raise KeyError("of the round")

        with pytest.raises(LookupError, match="no pool"):
            await receive()
        with pytest.raises(KeyError, match="of the round"):
            await fail()


async def test_a_disk_that_takes_no_reputations_is_said_once(
    nursery: trio.Nursery, autojump_clock: MockClock, tmp_path: Path
) -> None:
    node = Node(MemoryNetwork(nursery), 1, directory=tmp_path)
    async with node.opened() as node.swarm:
        (tmp_path / "reputation.json").mkdir()
        await trio.sleep(200)
    assert Counter(level for level, _ in node.said)["warning"] == 1


def test_numbers_grow_whatever_the_clock_does() -> None:
    time = [1000.0]
    number = Numbers(lambda: time[0])
    first = [number(), number()]
    time[0] = 10.0
    second = [number(), number()]
    assert first + second == sorted({*first, *second})
    time[0] = 1001.0
    assert Numbers(lambda: time[0])() > second[-1]
