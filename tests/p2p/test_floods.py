"""Floods of what is harmless one by one: who pours them out is blamed, and nobody who merely passes things on."""

from pathlib import Path
from typing import Any

import pytest
import trio
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils import encode_varint_prefixed
from trio.testing import MockClock

from p2p.canonical import encode
from p2p.host import pubsub
from p2p.memory import MemoryNetwork
from p2p.reasons import Reason
from p2p.serving import PROTOCOL, list_frame
from p2p.transport import TransportError, Verdict
from tests.p2p.admitting import BAD, GOOD, Node, sealed
from tests.p2p.fakes import Clock
from tests.p2p.forging import NOW, peer
from tests.p2p.hostile import hostile_peer
from tests.p2p.hosts import TOPIC, meshed, running, until
from tests.p2p.test_memory import Log
from tests.p2p.test_swarm import Node as SwarmNode

# What passes admission


async def test_a_node_s_own_batches_sent_back_to_it_again_and_again_are_a_replay() -> None:
    clock = Clock(0.0)
    node = Node(clock)
    for number in range(1000):
        clock.time += 0.01
        node.send(sealed(number % 5, signer=100), BAD)
    assert node.bans == [BAD]
    assert node.rejected[Reason.REPLAY] > 0


async def test_batches_that_catch_up_brought_before_gossip_did_are_no_replay(autojump_clock: MockClock) -> None:
    clock = Clock(0.0)
    node = Node(clock)
    for number in range(160):
        if number % 20 == 0:
            await node.settle()
        assert node.send(sealed(number), requested=True) is Verdict.ACCEPT
    for number in range(160):
        clock.time += 0.1
        assert node.send(sealed(number)) is Verdict.IGNORE
    assert not node.rejected
    assert node.reputation.score(GOOD) >= 0


async def test_a_flood_of_batches_from_another_time_bans_who_brings_it() -> None:
    clock = Clock(0.0)
    node = Node(clock)
    for number in range(600):
        clock.time += 0.001
        node.send(sealed(number, created=(0.0, NOW + 10**6)[number % 2]), BAD)
    assert node.bans == [BAD]
    assert node.rejected[Reason.STALE] >= 500
    assert node.reputation.score(GOOD) == 0


async def test_a_node_whose_own_clock_is_wrong_bans_nobody() -> None:
    clock = Clock(0.0)
    node = Node(clock)
    node.now.time += 10**6
    for number in range(1200):
        clock.time += 0.025
        # Two origins, twenty batches a second of each, all by way of one neighbour.
        node.send(sealed(number, signer=1 + number % 2), BAD)
    assert node.rejected[Reason.STALE] == 1200
    assert not node.bans


# Catch-up


async def test_a_flood_of_catch_up_requests_bans_who_sends_it(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    network = MemoryNetwork(nursery)
    greedy = network.join(peer(9), Log())
    node = SwarmNode(network, 1)
    async with node.opened() as node.swarm:
        await greedy.connect(node.transport.addresses()[0])
        answers = []
        for _ in range(200):
            try:
                async with greedy.open(node.peer, PROTOCOL) as stream:
                    await stream.send(list_frame(600, 1, [0]))
                    answers.append(await stream.receive(100))
            except TransportError:
                continue
        assert answers.count(encode(["busy", 8])) == pytest.approx(60, abs=10)
        assert not greedy.connections()
        assert greedy.peer_id in node.transport.blocked


async def test_a_ban_is_on_disk_soon(nursery: trio.Nursery, tmp_path: Path) -> None:
    node = SwarmNode(MemoryNetwork(nursery), 1, directory=tmp_path)
    path = tmp_path / "reputation.json"
    async with node.opened() as node.swarm:
        for _ in range(8):
            node.transport.observer.misbehaved(peer(9), "garbage for protobuf")
        await until(lambda: path.exists() and peer(9) in path.read_text())


# Gossip's control messages, and messages of no use

TINY = [b"\x01"] * 300_000
STORMS = {
    "offers": rpc_pb2.ControlMessage(ihave=[rpc_pb2.ControlIHave(topicID=TOPIC, messageIDs=TINY)]),
    "requests": rpc_pb2.ControlMessage(iwant=[rpc_pb2.ControlIWant(messageIDs=TINY)]),
    "empty requests": rpc_pb2.ControlMessage(iwant=[rpc_pb2.ControlIWant()] * 300_000),
    "not wanted": rpc_pb2.ControlMessage(idontwant=[rpc_pb2.ControlIDontWant(messageIDs=[b"\x01"])] * 150_000),
    "grafts": rpc_pb2.ControlMessage(graft=[rpc_pb2.ControlGraft(topicID="")] * 250_000),
    "prunes": rpc_pb2.ControlMessage(prune=[rpc_pb2.ControlPrune(topicID="")] * 250_000),
}
FLOODS = {name: rpc_pb2.RPC(control=control) for name, control in STORMS.items()}


@pytest.fixture(autouse=True)
def _quick_heart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pubsub, "HEARTBEAT_SECONDS", 0.2)


async def test_storms_of_control_messages_cost_their_sender() -> None:
    async with running() as a, running() as b:
        await meshed(a, b)
        for name, flood in FLOODS.items():
            async with hostile_peer() as evil:
                await evil.connect(a.address)
                await evil.rpc(flood)
                with trio.move_on_after(10):
                    while evil.peer_id not in dict(a.watcher.offences):
                        await trio.sleep(0.01)
                assert "flood" in dict(a.watcher.offences).get(evil.peer_id, "nothing noticed"), name
        await b.host.publish(TOPIC, b"still here")
        await until(lambda: b"still here" in a.delivered)
        assert b.host.peer_id not in dict(a.watcher.offences)


@pytest.mark.parametrize("topic", [TOPIC, "/swarmnode/2/elsewhere/rollouts/0"])
async def test_a_flood_of_messages_that_are_of_no_use_costs_its_sender(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pubsub, "HEARTBEAT_SECONDS", 10.0)
    async with running() as a, hostile_peer() as evil:
        await a.subscribe()
        await evil.connect(a.address)
        message = evil.message(topic, b"")
        await evil.rpc(rpc_pb2.RPC(publish=[message] * 1000))
        await evil.publish_raw(TOPIC, b"heard")
        await until(lambda: b"heard" in a.delivered)
        assert not a.watcher.offences
        await evil.rpc(rpc_pb2.RPC(publish=[message] * 5000))
        await until(lambda: "no use" in dict(a.watcher.offences).get(evil.peer_id, ""))


async def test_whoever_sends_nothing_but_nonsense_is_blamed_each_time() -> None:
    nonsense = rpc_pb2.RPC(control=rpc_pb2.ControlMessage(iwant=[rpc_pb2.ControlIWant(messageIDs=[bytes(500)])]))
    async with running(app_score=lambda peer: -50.0) as a, hostile_peer() as evil:
        await a.subscribe()
        await evil.connect(a.address)
        await evil.raw_meshsub(encode_varint_prefixed(nonsense.SerializeToString()))
        await until(lambda: "message id" in dict(a.watcher.offences).get(evil.peer_id, ""))


async def test_strangers_cannot_take_all_places() -> None:
    async with running(max_peers=4) as a, running() as friend, trio.open_nursery() as nursery:

        async def stay(task_status: Any) -> None:
            async with hostile_peer() as evil:
                await evil.connect(a.address)
                task_status.started()
                await trio.sleep_forever()

        for _ in range(5):
            await nursery.start(stay)
        await until(lambda: len(a.host.connections()) == 3)
        await a.host.connect(friend.address)
        assert len(a.host.connections()) == 4
        nursery.cancel_scope.cancel()


async def test_nothing_is_kept_of_what_strangers_said_of_themselves() -> None:
    async with running() as a:
        store = a.host.libp2p.get_peerstore()
        before = len(store.peer_ids())
        async with hostile_peer() as evil:
            await evil.connect(a.address)
            await until(lambda: a.host.protocols(evil.peer_id))
            await evil.host.get_network().close_peer(evil.victim)
            await until(lambda: a.watcher.disconnections)
            assert len(store.peer_ids()) == before
