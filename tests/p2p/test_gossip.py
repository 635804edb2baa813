"""Topics, shards and the outbox."""

import pytest
import trio
from trio.testing import MockClock

from p2p.gossip import BURST, OUTBOX, RATE, Gossip, shard_of, shards_heard, topic_of
from p2p.memory import MemoryNetwork, MemoryTransport
from p2p.transport import Verdict
from p2p.wire import Envelope
from tests.p2p.forging import batch, peer
from tests.p2p.test_memory import Log


def envelope(number: int) -> Envelope:
    """Not a real one: nobody here looks inside."""
    return Envelope(b"%d" % number, number.to_bytes(32, "big"), peer(1), batch(number))


class Node:
    """Gossip that accepts everything."""

    def __init__(
        self,
        transport: MemoryTransport,
        shards: int = 1,
        subscribe: int = 1,
        pace: tuple[float, float] = (RATE, BURST),
    ) -> None:
        self.got: list[bytes] = []
        self.at: list[float] = []
        self.transport = transport
        self.gossip = Gossip(transport, "main", shards, subscribe, self.check, pace)

    def check(self, data: bytes, forwarder: str) -> Verdict:
        self.got.append(data)
        self.at.append(trio.current_time())
        return Verdict.ACCEPT


def test_the_own_shard_comes_first_and_all_shards_are_heard_by_as_many() -> None:
    listeners = dict.fromkeys(range(8), 0)
    for number in range(1, 65):
        heard = shards_heard(peer(number), 8, 3)
        assert heard == shards_heard(peer(number), 8, 3)
        assert heard[0] == shard_of(peer(number), 8)
        assert len(set(heard)) == 3
        for shard in heard:
            listeners[shard] += 1
    assert min(listeners.values()) > 0
    assert sorted(shards_heard(peer(1), 4, 9)) == [0, 1, 2, 3]
    assert topic_of("main", 3) == "/swarmnode/2/main/rollouts/3"


async def test_a_node_hears_its_shards_only(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    network = MemoryNetwork(nursery)
    first = peer(1)
    same, other = (
        next(peer(n) for n in range(2, 99) if (shard_of(peer(n), 4) == shard_of(first, 4)) is wanted)
        for wanted in (True, False)
    )
    sender, near, far = (Node(network.join(name, Log()), shards=4) for name in (first, same, other))
    for node in (sender, near, far):
        await node.gossip.subscribe()
        nursery.start_soon(node.gossip.run)
    for node in (near, far):
        await sender.transport.connect(node.transport.addresses()[0])
    await sender.gossip.publish(envelope(1))
    await trio.sleep(1)
    assert near.got == [b"1"]
    assert far.got == []
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("pace", [(RATE, BURST), (100.0, 5.0)])
async def test_a_full_outbox_makes_the_sender_wait_and_loses_nothing(
    pace: tuple[float, float], nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    network, (rate, burst) = MemoryNetwork(nursery), pace
    sender, receiver = Node(network.join(peer(1), Log()), pace=pace), Node(network.join(peer(2), Log()))
    for node in (sender, receiver):
        await node.gossip.subscribe()
    await sender.transport.connect(receiver.transport.addresses()[0])
    count = OUTBOX + 100
    begun = trio.current_time()

    async def send() -> None:
        for number in range(count):
            await sender.gossip.publish(envelope(number))

    nursery.start_soon(send)
    await trio.testing.wait_all_tasks_blocked()
    assert sender.gossip.waiting == OUTBOX
    nursery.start_soon(sender.gossip.run)
    await trio.sleep((count - burst) / rate + 5)

    assert receiver.got == [b"%d" % number for number in range(count)]
    assert sender.gossip.sent == count
    # Never more than what a receiver takes: a burst, then the rate.
    for place, at in enumerate(receiver.at):
        assert place + 1 <= burst + rate * (at - begun) + 1
    nursery.cancel_scope.cancel()


async def test_alone_it_sends_into_the_void_without_waiting(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    node = Node(MemoryNetwork(nursery).join(peer(1), Log()))
    await node.gossip.subscribe()
    nursery.start_soon(node.gossip.run)
    for number in range(10):
        await node.gossip.publish(envelope(number))
    await trio.sleep(0.5)
    assert node.gossip.sent == 10
    nursery.cancel_scope.cancel()


async def test_it_waits_a_moment_for_a_mesh_that_is_being_made(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    network = MemoryNetwork(nursery)
    sender, receiver = Node(network.join(peer(1), Log())), Node(network.join(peer(2), Log()))
    for node in (sender, receiver):
        await node.gossip.subscribe()
    await sender.transport.connect(receiver.transport.addresses()[0])
    network.mesh_seconds = 1.0
    nursery.start_soon(sender.gossip.run)
    await sender.gossip.publish(envelope(1))
    await trio.sleep(0.5)
    assert receiver.got == []
    await trio.sleep(1)
    assert receiver.got == [b"1"]
    # One that never comes into the mesh holds up nothing more than once.
    network.mesh_seconds = 1e6
    for number in range(10):
        await sender.gossip.publish(envelope(number))
    await trio.sleep(4)
    assert sender.gossip.sent == 11
    nursery.cancel_scope.cancel()
