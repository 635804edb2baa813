"""A node among peers that mean harm: each attack is refused for its reason and ends in a ban, and the rounds go on."""

import os
import struct
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils import encode_varint_prefixed

from node.snapshot import PeerRow
from p2p.canonical import encode
from p2p.gossip import topic_of
from p2p.serving import PROTOCOL, list_frame
from p2p.wire import WireGroup, seal
from rl.rollouts import Completion
from tests.e2e.nodes import RunningNode, StartNode
from tests.p2p.forging import batch, forge, frame, tree
from tests.p2p.hostile import HostilePeer, hostile_peer, peer_bytes
from tests.p2p.hosts import until
from verifiers.base import TaskRef
from verifiers.sandbox import open_sandbox
from verifiers.settings import VerifierSettings

pytestmark = pytest.mark.slow

LISTEN = ("--listen", "/ip4/127.0.0.1/tcp/0")
TOPIC = topic_of("main", 0)
SECONDS, LANES = 120, 8
"""A deadline for what takes a second or two when the machine has nothing else to do, and attacks at a time."""
BOMB = zlib.compress(bytes(100_000_000))

_numbers = count(int(time.time() * 1e6))


@dataclass(frozen=True)
class Groups:
    """Groups of a task that may be trained on, and of one that may not; the prompts are right."""

    good: WireGroup
    held_out: WireGroup


async def some_groups() -> Groups:
    """By this machine's own verifier, as every node makes them."""
    found: dict[bool, WireGroup] = {}
    async with open_sandbox(VerifierSettings(), []) as sandbox:
        version, config = await sandbox.canonical("reasoning_gym", {"dataset": "gcd", "max_value": 30})
        for index in count():
            ref = TaskRef("reasoning_gym", version, config, 1, index)
            task = await sandbox.make(ref)
            answers = tuple(Completion(answer, True) for answer in ("1", "2"))
            found.setdefault(task.held_out, WireGroup(ref, task.prompt, answers, 1))
            if len(found) == 2:
                break
    return Groups(found[False], found[True])


class Attacker:
    """A hostile peer that is connected to the victim, and what it attacks with."""

    def __init__(self, evil: HostilePeer, groups: Groups, address: str) -> None:
        self.evil = evil
        self.groups = groups
        self.address = address

    def sealed(self, *groups: WireGroup, sequence: int | None = None, **changes: Any) -> bytes:
        """A sound batch of its own."""
        changes.setdefault("created", time.time())
        return seal(self.evil.key, batch(sequence or next(_numbers), groups or [self.groups.good], **changes)).data

    def forged(self, **changes: Any) -> bytes:
        """A batch of its own with other fields than there should be, rightly signed."""
        content = tree(batch(next(_numbers), [self.groups.good], created=time.time()))
        return forge(content | changes, self.evil.key)

    def with_logprobs(self, data: bytes) -> bytes:
        content = tree(batch(next(_numbers), [self.groups.good], created=time.time()))
        content["groups"][0]["completions"][0]["logprobs"] = data
        return forge(content, self.evil.key)

    async def publish(self, *envelopes: bytes) -> None:
        messages = [self.evil.message(TOPIC, data) for data in envelopes]
        await self.evil.rpc(rpc_pb2.RPC(publish=messages))

    async def ask(self, *frames: bytes) -> None:
        """Frames to the victim's catch-up."""
        stream = await self.evil.host.new_stream(self.evil.victim, [PROTOCOL])
        for data in frames:
            await stream.write(len(data).to_bytes(4, "big") + data)
        await stream.close()

    async def overheard(self) -> bytes:
        """An envelope that the victim has passed on or sent."""
        await self.evil.join(TOPIC)
        await until(lambda: any(rpc.publish for rpc in self.evil.received))
        return bytes(next(rpc.publish[0].data for rpc in self.evil.received if rpc.publish))


Attack = Callable[[Attacker], Awaitable[object]]


async def twice(a: Attacker) -> None:
    """Two batches under one number."""
    number = next(_numbers)
    await a.publish(a.sealed(sequence=number), a.sealed(sequence=number, model="other"))


async def replay(a: Attacker) -> None:
    envelope = await a.overheard()
    for _ in range(10):
        await a.publish(*[envelope] * 20)


async def flood(a: Attacker, **changes: Any) -> None:
    """A thousand batches a second."""
    for _ in range(10):
        await a.publish(*[a.sealed(**changes) for _ in range(20)])
        await trio.sleep(0.02)


async def unknown_topics(a: Attacker) -> None:
    await a.evil.rpc(rpc_pb2.RPC(publish=[a.evil.message("elsewhere", b"", signed=False)] * 6000))


async def control_storm(a: Attacker) -> None:
    ids = [bytes(2)] * 100_000
    await a.evil.control(
        ihave=[rpc_pb2.ControlIHave(topicID=TOPIC, messageIDs=ids)], iwant=[rpc_pb2.ControlIWant(messageIDs=ids)]
    )


async def unasked(a: Attacker) -> None:
    """Connect anew, and answer the victim's catch-up with another envelope than it asks for."""

    async def answer(stream: Any) -> None:
        other = a.sealed()
        for data in (encode(["have", os.urandom(32) + len(other).to_bytes(4, "big")]), other):
            await stream.write(len(data).to_bytes(4, "big") + data)
        await trio.sleep(2)

    a.evil.host.set_stream_handler(PROTOCOL, answer)
    await a.evil.host.get_network().close_peer(a.evil.victim)
    await a.evil.connect(a.address)
    await trio.sleep(0.5)


async def sessions(a: Attacker) -> None:
    for _ in range(20):
        await a.ask(list_frame(600, 1, [0]))


def spoofed_envelope(a: Attacker) -> bytes:
    """In another's name."""
    version, _, payload, signature = msgpack.unpackb(a.sealed())
    other = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    return bytes(msgpack.packb([version, other, payload, signature]))


ATTACKS: dict[str, tuple[str, Attack]] = {
    "random bytes": ("decode", lambda a: a.publish(b"\xc1" + os.urandom(200))),
    "garbage for protobuf": ("protocol", lambda a: a.evil.raw_meshsub(encode_varint_prefixed(b"\xff" * 60))),
    "nonsense in protobuf": (
        "protocol",
        lambda a: a.evil.control(iwant=[rpc_pb2.ControlIWant(messageIDs=[bytes(500)])]),
    ),
    "a tampered message": ("protocol", lambda a: a.evil.publish_raw(TOPIC, a.sealed(), tampered=True)),
    "an unsigned message": ("protocol", lambda a: a.evil.publish_raw(TOPIC, a.sealed(), signed=False)),
    "a spoofed message": (
        "protocol",
        lambda a: a.evil.publish_raw(TOPIC, a.sealed(), origin=peer_bytes(Ed25519PrivateKey.generate())),
    ),
    "a tampered envelope": ("signature", lambda a: a.publish(a.sealed()[:-1] + b"!")),
    "a spoofed envelope": ("signature", lambda a: a.publish(spoofed_envelope(a))),
    "a replayed envelope": ("replay", replay),
    "a compression bomb": ("decode", lambda a: a.publish(frame(BOMB, a.evil.key))),
    "a message of 10 MB": ("protocol", lambda a: a.evil.raw_meshsub(encode_varint_prefixed(bytes(10_000_000)))),
    "an envelope of 300 KB": ("too_large", lambda a: a.publish(bytes(300_000))),
    "deeply nested msgpack": ("decode", lambda a: a.publish(forge(b"\x91" * 100_000, a.evil.key))),
    "NaN": ("schema", lambda a: a.publish(a.with_logprobs(struct.pack(">f", float("nan"))))),
    "10,000 groups": ("schema", lambda a: a.publish(a.forged(groups=[{}] * 10_000))),
    "another swarm": ("wrong_swarm", lambda a: a.publish(a.sealed(swarm="other"))),
    "two batches under one number": ("equivocation", twice),
    "a task that does not exist": (
        "no_such_task",
        lambda a: a.publish(
            a.sealed(replace(a.groups.good, ref=replace(a.groups.good.ref, config='{"dataset":"nonsense"}')))
        ),
    ),
    "a wrong prompt": ("wrong_prompt", lambda a: a.publish(a.sealed(replace(a.groups.good, prompt="1 + 1 = ?")))),
    "a held-out task": ("held_out", lambda a: a.publish(a.sealed(a.groups.held_out))),
    "a flood": ("rate", flood),
    "a flood of old batches": ("stale", lambda a: flood(a, created=time.time() - 10 * 86400)),
    "a flood of what nobody subscribed to": ("protocol", unknown_topics),
    "a storm of control messages": ("protocol", control_storm),
    "garbage for catch-up": ("protocol", lambda a: a.ask(b"\xff" * 100)),
    "a catch-up request of 10 MB": ("protocol", lambda a: a.ask(bytes(10_000_000))),
    "a flood of catch-up requests": ("protocol", sessions),
    "catch-up answers that were not asked for": ("protocol", unasked),
}
"""By name: the reason that is counted, and the attack, which is repeated until the peer is banned."""


async def repeat(a: Attacker, attack: Attack) -> None:
    """Until the victim has hung up."""
    until_then = trio.current_time() + SECONDS
    while a.evil.is_connected and trio.current_time() < until_then:
        # Streams are reset, and the connection is cut in the middle of anything: libp2p has many words for it.
        with suppress(Exception), trio.move_on_after(10):
            await attack(a)
        await trio.sleep(0.05)


@asynccontextmanager
async def deaf_peer(address: str) -> AsyncIterator[HostilePeer]:
    """One that wants all gossip and reads nothing of it."""
    async with hostile_peer() as evil:
        await evil.connect(address)
        await evil.join(TOPIC)
        await until(lambda: any(rpc.publish for rpc in evil.received))
        evil.stop_reading()
        yield evil


def of_peer(node: RunningNode, peer: str) -> PeerRow:
    """What a node says of another."""
    snapshot = node.snapshot()
    rows = {} if snapshot is None else {row.peer: row for row in snapshot.peers}
    return rows.get(peer, PeerRow(peer=peer))


async def judgement(victim: RunningNode, peer: str, reason: str) -> PeerRow | None:
    """Wait until the victim says that it banned the peer and why. Returns what it says instead at the deadline."""
    with trio.move_on_after(SECONDS):
        while True:
            row = of_peer(victim, peer)
            if not row.connected and row.banned_seconds and reason in row.rejected:
                return None
            await trio.sleep(0.1)
    return row


async def attack_all(
    victim: RunningNode, address: str, groups: Groups
) -> tuple[dict[str, Ed25519PrivateKey], dict[str, PeerRow]]:
    """All attacks, each by a peer of its own, a few at a time. Returns the peers' keys, and by the names of the attacks
    those that did not end as they should.
    """
    keys: dict[str, Ed25519PrivateKey] = {}
    failed: dict[str, PeerRow] = {}
    lanes = trio.CapacityLimiter(LANES)

    async def make(name: str, reason: str, attack: Attack) -> None:
        async with lanes, hostile_peer() as evil:
            keys[evil.peer_id] = evil.key
            await evil.connect(address)
            await repeat(Attacker(evil, groups, address), attack)
            # At once: the first ban is short.
            row = await judgement(victim, evil.peer_id, reason)
            if row is not None:
                failed[name] = row

    async with trio.open_nursery() as nursery:
        for name, (reason, attack) in ATTACKS.items():
            nursery.start_soon(make, name, reason, attack)
    return keys, failed


async def test_every_attack_is_counted_and_ends_in_a_ban_while_the_rounds_go_on(
    start_node: StartNode, tmp_path: Path
) -> None:
    victim = start_node(*LISTEN, data_dir=tmp_path / "victim", silo=False)
    address = victim.address()
    honest = start_node(*LISTEN, "--join", address, data_dir=tmp_path / "honest", silo=False)
    groups = await some_groups()
    for node in (victim, honest):
        node.wait_until(lambda node=node: (now := node.snapshot()) is not None and now.admitted > 0)  # type: ignore[misc]
    process = psutil.Process(victim.process.pid)
    before, rounds, admitted = process.memory_info().rss, len(victim.rounds()), of_peer(victim, honest.node_id).groups

    async with deaf_peer(address) as deaf:
        keys, failed = await attack_all(victim, address, groups)
        assert failed == {}
        await until(lambda: not of_peer(victim, deaf.peer_id).connected, 30)

    # Who is banned and comes again is not let in.
    snapshot = victim.snapshot()
    assert snapshot is not None
    banned = max(snapshot.peers, key=lambda row: row.banned_seconds).peer
    async with hostile_peer(keys[banned]) as again:
        with suppress(Exception):
            await again.connect(address)
        await until(lambda: not again.is_connected)

    assert process.memory_info().rss - before < 100e6
    assert len(victim.rounds()) > rounds + 10
    snapshot = victim.snapshot()
    assert snapshot is not None
    assert snapshot.lag_ms.p99 < 1000
    reasons = {reason for record in victim.records() for reason in record["rejected"]}
    assert reasons >= {reason for reason, _ in ATTACKS.values()}
    for node, other in ((victim, honest), (honest, victim)):
        row = of_peer(node, other.node_id)
        assert row.connected
        assert row.banned_seconds == 0
        assert row.rejected == {}
    count = of_peer(victim, honest.node_id).groups
    assert count > admitted
    await until(lambda: of_peer(victim, honest.node_id).groups > count, 20)
