"""Hosts among peers that do not behave: each fault of libp2p, and each attack, leaves all others untouched."""

import os
import struct
import tracemalloc
from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.host.exceptions import StreamFailure
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.network.stream.exceptions import StreamError
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils import encode_varint_prefixed
from multiaddr import Multiaddr

from p2p.host import muxer, network, pubsub, streams, yamux
from p2p.host.settings import PEER_STREAMS
from p2p.transport import Stream, TransportError, Verdict
from tests.p2p.hostile import HostilePeer, hostile_peer, peer_bytes
from tests.p2p.hosts import TOPIC, Node, meshed, running, until


def _frame(body: bytes) -> bytes:
    assert len(body) < 128
    return bytes([len(body)]) + body


def _header(kind: int, flags: int, stream: int, length: int, version: int = 0) -> bytes:
    return struct.pack("!BBHII", version, kind, flags, stream, length)


@pytest.fixture(autouse=True)
def _quick_heart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beat often, so that the tests need not wait."""
    monkeypatch.setattr(pubsub, "HEARTBEAT_SECONDS", 0.2)


async def _still_fine(a: Node, b: Node) -> None:
    """Two honest hosts exchange messages both ways."""
    for sender, receiver in ((a, b), (b, a)):
        token = os.urandom(16)
        await sender.host.publish(TOPIC, token)
        await until(partial(_has, receiver, token))


def _has(node: Node, message: bytes) -> bool:
    return message in node.delivered


Attack = Callable[[HostilePeer, Node], Awaitable[object]]

GARBAGE: dict[str, tuple[Attack, str]] = {
    "random bytes": (lambda evil, _: evil.raw_meshsub(_frame(b"\xff" * 60)), "protobuf"),
    "a length without end": (lambda evil, _: evil.raw_meshsub(b"\xff" * 20), "length"),
    "a frame of 10 MB": (lambda evil, _: evil.raw_meshsub(b"\x80\xad\xe2\x04" + bytes(100)), "gossip frame of"),
    "a message of 400 KB": (lambda evil, _: evil.publish_raw(TOPIC, bytes(400_000)), "a message of 400000"),
    "unsigned": (lambda evil, _: evil.publish_raw(TOPIC, b"x", signed=False), "unsigned"),
    "tampered": (lambda evil, _: evil.publish_raw(TOPIC, b"x", tampered=True), "bad signature"),
    "from nobody": (lambda evil, _: evil.publish_raw(TOPIC, b"x", origin=b""), "no Ed25519 peer"),
    "from a hash": (lambda evil, _: evil.publish_raw(TOPIC, b"x", origin=b"\x12\x20" + bytes(32)), "no Ed25519 peer"),
    "in another's name": (
        lambda evil, _: evil.publish_raw(TOPIC, b"x", origin=peer_bytes(Ed25519PrivateKey.generate())),
        "bad signature",
    ),
    "from no point of the curve": (
        lambda evil, _: evil.publish_raw(TOPIC, b"x", origin=b"\x00\x24\x08\x01\x12\x20" + b"\xff" * 32),
        "bad signature",
    ),
    "no counter": (lambda evil, _: evil.publish_raw(TOPIC, b"x", seqno=b""), "no counter"),
    "control nonsense": (
        lambda evil, _: evil.control(iwant=[rpc_pb2.ControlIWant(messageIDs=[bytes(500)])]),
        "message id",
    ),
    "a topic that is no text": (
        lambda evil, _: evil.raw_meshsub(_frame(b"\x0a\x06\x08\x01\x12\x02\xff\xfe")),
        "topic name",
    ),
    "an endless topic": (lambda evil, _: evil.join("x" * 5000), "topic name"),
}


async def test_garbage_of_every_kind_costs_its_sender_and_nobody_else() -> None:
    async with running() as a, running() as b:
        await meshed(a, b)

        async def attempt(name: str) -> None:
            attack, offence = GARBAGE[name]
            async with hostile_peer() as evil:
                await evil.connect(a.address)
                await attack(evil, a)
                with trio.move_on_after(10):
                    await until(lambda: evil.peer_id in dict(a.watcher.offences))
                assert offence in dict(a.watcher.offences).get(evil.peer_id, "nothing noticed"), name

        async with trio.open_nursery() as nursery:
            for name in GARBAGE:
                nursery.start_soon(attempt, name)
        await _still_fine(a, b)
        assert not b.watcher.offences
        assert all(len(message) == 16 for message in a.delivered + b.delivered)


async def test_a_key_that_is_not_the_origins_is_refused() -> None:
    async with running() as a, hostile_peer() as evil:
        await a.subscribe()
        await evil.connect(a.address)
        message = evil.message(TOPIC, b"x")
        message.key = b"\x08\x01\x12\x20" + bytes(32)
        await evil.rpc(rpc_pb2.RPC(publish=[message]))
        await until(lambda: a.watcher.offences)
        message = evil.message(TOPIC, b"y")
        message.key = peer_bytes(evil.key)[2:]
        await evil.rpc(rpc_pb2.RPC(publish=[message], senderRecord=b"garbage, which is not looked at"))
        await until(lambda: a.delivered == [b"y"])


async def test_fields_that_no_signature_covers_are_not_passed_on() -> None:
    async with running() as a, hostile_peer() as evil, hostile_peer() as other:
        await a.subscribe()
        for peer in (evil, other):
            await peer.connect(a.address)
            await peer.join(TOPIC)
        await until(lambda: {evil.peer_id, other.peer_id} <= set(a.host.mesh(TOPIC)))
        message = evil.message(TOPIC, b"x")
        clean = message.SerializeToString()
        await evil.rpc(rpc_pb2.RPC(publish=[rpc_pb2.Message.FromString(clean + b"\xfa\x01\x03abc")]))
        await until(lambda: any(rpc.publish for rpc in other.received))
        passed_on = next(rpc.publish[0] for rpc in other.received if rpc.publish)
        assert passed_on.SerializeToString() == clean


async def test_replays_and_echoes_are_dropped_without_blame() -> None:
    async with running() as a, running() as b, hostile_peer() as evil:
        await meshed(a, b)
        await evil.connect(a.address)
        await evil.join(TOPIC)
        await until(lambda: evil.peer_id in a.host.mesh(TOPIC))
        message = await evil.publish_raw(TOPIC, b"once")
        for _ in range(3):
            await evil.rpc(rpc_pb2.RPC(publish=[message]))
        await a.host.publish(TOPIC, b"mine")
        await until(lambda: any(rpc.publish and rpc.publish[0].data == b"mine" for rpc in evil.received))
        echo = next(rpc for rpc in evil.received if rpc.publish and rpc.publish[0].data == b"mine")
        await evil.rpc(echo)
        await evil.publish_raw(TOPIC, b"last")
        await until(lambda: b"last" in a.delivered and b"last" in b.delivered)
        assert a.delivered == [b"once", b"last"]
        assert b.delivered == [b"once", b"mine", b"last"]
        assert not a.watcher.offences


async def test_a_peer_whose_messages_are_rejected_leaves_the_mesh_and_is_not_let_in_again() -> None:
    async with running() as a, hostile_peer() as evil:
        await a.subscribe()
        await evil.connect(a.address)
        await evil.join(TOPIC)
        await until(lambda: evil.peer_id in a.host.mesh(TOPIC))
        a.verdict = Verdict.IGNORE
        await evil.flood(TOPIC, 20)
        await trio.sleep(0.5)
        assert a.host.mesh(TOPIC) == [evil.peer_id]
        a.verdict = Verdict.REJECT
        await evil.flood(TOPIC, 2)
        await until(lambda: not a.host.mesh(TOPIC))
        await until(lambda: any(rpc.control.prune for rpc in evil.received))
        for _ in range(3):
            await evil.control(graft=[rpc_pb2.ControlGraft(topicID=TOPIC)])
        await trio.sleep(0.2)
        assert a.host.mesh(TOPIC) == []
        a.verdict = Verdict.ACCEPT
        await evil.publish_raw(TOPIC, b"heard still")
        await until(lambda: a.delivered == [b"heard still"])
        for _ in range(5):
            await evil.publish_raw(TOPIC, b"x", tampered=True)
        await until(lambda: "still sends" in a.watcher.offences[-1][1] if a.watcher.offences else False)
        await evil.publish_raw(TOPIC, b"heard no more")
        await trio.sleep(0.2)
        assert a.delivered == [b"heard still"]


async def test_the_application_s_opinion_of_a_peer_keeps_it_out_of_the_mesh() -> None:
    opinion: dict[str, float] = {}
    async with running(app_score=lambda peer: opinion.get(peer, 0.0)) as a, running() as b:
        await meshed(a, b)
        opinion[b.host.peer_id] = -1.0
        await until(lambda: not a.host.mesh(TOPIC) and not b.host.mesh(TOPIC))


async def test_a_deaf_peer_is_disconnected_rather_than_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pubsub, "_PUBLISH_SECONDS", 0.5)
    async with running() as a, running() as b, hostile_peer(deaf=True) as evil:
        await meshed(a, b)
        await evil.connect(a.address)
        await evil.join(TOPIC)
        await until(lambda: evil.peer_id in a.host.mesh(TOPIC))
        with trio.fail_after(20):
            for number in range(60):
                await a.host.publish(TOPIC, number.to_bytes(4, "big") * 65536)
        await until(lambda: evil.peer_id not in [one.peer for one in a.host.connections()])
        await until(lambda: len(b.delivered) == 60)
        assert a.watcher.disconnections == [evil.peer_id]


async def test_a_peer_that_reads_nothing_at_all_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(ping_seconds=0.3) as a, running() as b, hostile_peer() as evil:
        await meshed(a, b)
        await evil.connect(a.address)
        await evil.join(TOPIC)
        await until(lambda: evil.peer_id in a.host.mesh(TOPIC))
        evil.stop_reading()
        for _ in range(20):
            await a.host.publish(TOPIC, os.urandom(200_000))
        await until(lambda: evil.peer_id in a.watcher.disconnections)
        await until(lambda: len(b.delivered) == 20)


async def test_a_flood_of_grafts_offers_and_requests_is_answered_within_bounds() -> None:
    async with running() as a, running() as b, hostile_peer() as evil:
        await meshed(a, b)
        await evil.connect(a.address)
        for _ in range(30):
            ids = [os.urandom(40) for _ in range(500)]
            await evil.control(
                graft=[rpc_pb2.ControlGraft(topicID=TOPIC)] * 100,
                prune=[rpc_pb2.ControlPrune(topicID=TOPIC, backoff=2**40)] * 100,
                ihave=[rpc_pb2.ControlIHave(topicID=TOPIC, messageIDs=ids)],
                iwant=[rpc_pb2.ControlIWant(messageIDs=ids)],
                idontwant=[rpc_pb2.ControlIDontWant(messageIDs=ids)],
            )
        await _still_fine(a, b)
        asked = sum(len(iwant.messageIDs) for rpc in evil.received for iwant in rpc.control.iwant)
        assert asked <= 128 * 30
        assert evil.peer_id not in a.host.mesh(TOPIC)


async def test_no_more_is_asked_of_a_peer_nor_given_to_it_than_one_heartbeat_can_bear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pubsub, "HEARTBEAT_SECONDS", 60.0)
    async with running() as a, hostile_peer() as evil:
        await a.subscribe()
        await evil.connect(a.address)
        await evil.join(TOPIC)
        await until(lambda: evil.peer_id in a.host.mesh(TOPIC))
        ids = [os.urandom(40) for _ in range(500)]
        await evil.control(ihave=[rpc_pb2.ControlIHave(topicID=TOPIC, messageIDs=ids)])
        await a.host.publish(TOPIC, bytes(200_000))
        await until(lambda: _copies(evil) == 1)
        assert sum(len(iwant.messageIDs) for rpc in evil.received for iwant in rpc.control.iwant) == 128
        (sent,) = [message for rpc in evil.received for message in rpc.publish]
        await evil.control(iwant=[rpc_pb2.ControlIWant(messageIDs=[sent.from_id + sent.seqno] * 30)])
        await until(lambda: _copies(evil) >= 20)
        await a.host.publish(TOPIC, b"the last")
        await until(lambda: any(message.data == b"the last" for rpc in evil.received for message in rpc.publish))
        assert _copies(evil) == 1 + 20


def _copies(peer: HostilePeer) -> int:
    return sum(len(message.data) == 200_000 for rpc in peer.received for message in rpc.publish)


YAMUX: dict[str, bytes] = {
    "more than the window": (
        _header(0, 1, 9001, 30)
        + b"\x13/multistream/1.0.0\n\x09/sleep/1\n"
        + b"".join(_header(0, 0, 9001, 65536) + bytes(65536) for _ in range(5))
    ),
    "an oversized frame": _header(0, 1, 9001, 2**24) + bytes(70_000),
    "another version": _header(0, 0, 1, 0, version=7),
    "an unknown kind": _header(9, 0, 1, 0),
    "a stream of the other side's": _header(1, 1, 9000, 0),
}


async def _sleep(_stream: Stream) -> None:
    await trio.sleep(5)


async def test_a_peer_that_breaks_yamux_loses_its_connection() -> None:
    async with running() as a, running() as b:
        await meshed(a, b)
        a.host.serve("/sleep/1", _sleep)

        async def attempt(name: str) -> None:
            async with hostile_peer() as evil:
                await evil.connect(a.address)
                await evil.raw_yamux(YAMUX[name])
                with trio.move_on_after(10):
                    await until(lambda: evil.peer_id in a.watcher.disconnections)
                assert evil.peer_id in dict(a.watcher.offences), name

        async with trio.open_nursery() as nursery:
            for name in YAMUX:
                nursery.start_soon(attempt, name)
        await _still_fine(a, b)


def _connection(node: Node, peer: HostilePeer) -> muxer.Muxer:
    connections = [c.muxed_conn for each in node.host.network.connections.values() for c in each]
    (found,) = [each for each in connections if str(each.peer_id) == peer.peer_id]
    assert isinstance(found, muxer.Muxer)
    return found


async def test_streams_that_agree_on_no_protocol_are_bounded_in_number() -> None:
    async with running() as a, hostile_peer() as evil:
        await evil.connect(a.address)
        await until(lambda: a.host.connections())
        for number in range(3 * muxer.MAX_INBOUND):
            await evil.raw_yamux(_header(0, 1, 10_001 + 2 * number, 20) + b"\x13/multistream/1.0.0\n")
        await trio.sleep(0.2)
        assert muxer.MAX_INBOUND // 2 < len(_connection(a, evil).streams) <= muxer.MAX_INBOUND + 8


async def test_streams_that_nobody_reads_are_bounded_in_number_and_in_bytes() -> None:
    async with running() as a, running() as b, hostile_peer() as evil:
        await meshed(a, b)
        for number in range(4):
            a.host.serve(f"/sleep/{number}", _sleep)
        await evil.connect(a.address)
        await until(lambda: evil.peer_id in [one.peer for one in a.host.connections()])
        conn = _connection(a, evil)
        tracemalloc.start()
        for number in range(200):
            await evil.raw_yamux(_header(0, 1, 10_001 + 2 * number, 20) + b"\x13/multistream/1.0.0\n")
            await evil.raw_yamux(_header(0, 0, 10_001 + 2 * number, 10) + b"\x09/sleep/%d\n" % (number % 4))
        await trio.sleep(0.2)
        assert len(conn.streams) <= muxer.MAX_INBOUND + 8
        for number in range(40):
            if not conn.is_closed:
                await evil.raw_yamux(_header(0, 0, 10_001 + 2 * number, 200_000) + bytes(200_000))
            await trio.sleep(0.005)
        await until(lambda: "unread bytes" in dict(a.watcher.offences).get(evil.peer_id, ""))
        assert conn.buffered <= yamux.MAX_BUFFERED
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert used < 20e6
        await _still_fine(a, b)


async def test_a_stream_that_stalls_or_announces_too_much_ends_within_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "STREAM_SECONDS", 0.3)
    problems: list[str] = []
    waiting: list[Stream] = []
    async with running() as a, hostile_peer() as evil:

        async def ask(stream: Stream) -> None:
            try:
                await stream.receive(1000)
            except TransportError as error:
                problems.append(str(error))
                raise

        async def wait(stream: Stream) -> None:
            waiting.append(stream)
            await trio.sleep_forever()

        a.host.serve("/ask/1", ask)
        a.host.serve("/wait/1", wait)
        await evil.connect(a.address)
        for data, problem in (
            (b"", "too slow"),
            (b"\x00\x00\x00\x05ab", "too slow"),
            (b"\xff\xff\xff\xff", "4294967295 bytes where 1000"),
        ):
            stream = await evil.host.new_stream(evil.victim, ["/ask/1"])
            await stream.write(data or b"\x00")
            await until(partial(_last_has, problems, problem))
        for _ in range(3 * PEER_STREAMS):
            try:
                await (await evil.host.new_stream(evil.victim, ["/wait/1"])).write(b"\x00")
            except (StreamFailure, StreamError):
                continue
        await until(lambda: len(waiting) >= PEER_STREAMS)
        assert len(waiting) == PEER_STREAMS


def _last_has(lines: list[str], text: str) -> bool:
    return bool(lines) and text in lines[-1]


async def test_garbage_on_libp2p_s_own_protocols_is_survived() -> None:
    async with running() as a, running() as b, hostile_peer() as evil:
        await meshed(a, b)
        await evil.connect(a.address)
        for protocol in ("/ipfs/id/push/1.0.0", "/ipfs/ping/1.0.0", "/ipfs/id/1.0.0"):
            for data in (b"\xff" * 100, b"\x05hello", b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80"):
                stream = await evil.host.new_stream(evil.victim, [protocol])
                await stream.write(data)
                await stream.close()
        boast = Identify(listen_addrs=[Multiaddr(f"/ip4/10.0.0.1/tcp/{n}").to_bytes() for n in range(1, 3000)])
        stream = await evil.host.new_stream(evil.victim, ["/ipfs/id/push/1.0.0"])
        await stream.write(encode_varint_prefixed(boast.SerializeToString()))
        for greeting in (b"\xff" * 50, b"\x05\xff\xfe\xfd\xfc\n", b"\x80\x80\x80\x80\x04", b"\x01\n"):
            stream = await evil.host.get_network().new_stream(evil.victim)
            await stream.write(greeting)
        await until(lambda: a.host.libp2p.get_peerstore().addrs(evil.host.get_id()))
        assert len(a.host.libp2p.get_peerstore().addrs(evil.host.get_id())) < 40
        await _still_fine(a, b)


async def test_strangers_on_the_port_are_bounded() -> None:
    async with running() as a, running() as b:
        await meshed(a, b)
        port = int(a.address.split("/")[4])
        silent = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(network._MAX_HANDSHAKES + 10)]
        talkers = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(40)]
        for number, stream in enumerate(talkers):
            try:
                await stream.send_all(b"\xff\xff\xff\x7f" + bytes(100_000) if number % 2 else b"GET / HTTP/1.1\r\n\r\n")
            except trio.BrokenResourceError:
                continue
        await _still_fine(a, b)
        async with running() as c:
            await c.host.connect(a.address)
        assert len(a.host.network._handshakes) <= network._MAX_HANDSHAKES
        for stream in talkers + silent:
            await stream.aclose()
