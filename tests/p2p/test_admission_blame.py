"""Who is blamed, and who cannot be: a hostile peer gets itself banned and nobody else."""

import zlib

import msgpack
import pytest
from trio.testing import MockClock

from p2p import admission
from p2p.reasons import Reason
from p2p.settings import AdmissionSettings
from p2p.transport import Verdict
from p2p.wire import MAX_ENVELOPE, open_envelope, seal
from tests.p2p.admitting import BAD, GOOD, OTHER, Node, sealed
from tests.p2p.fakes import Clock, only
from tests.p2p.forging import batch, forge, frame, group, key, peer, tree


def tampered(data: bytes) -> bytes:
    return data[:-70] + bytes([data[-70] ^ 1]) + data[-69:]


def spoofed(data: bytes) -> bytes:
    version, _, payload, signature = msgpack.unpackb(data)
    return bytes(msgpack.packb([version, key(1).public_key().public_bytes_raw(), payload, signature]))


HOSTILE = {
    "garbage": (bytes(range(256)), Reason.DECODE),
    "nothing": (b"", Reason.DECODE),
    "too large": (bytes(MAX_ENVELOPE + 1), Reason.TOO_LARGE),
    "tampered": (tampered(sealed(1)), Reason.SIGNATURE),
    "spoofed": (spoofed(sealed(1, signer=2)), Reason.SIGNATURE),
    "unsigned": (msgpack.packb([*msgpack.unpackb(sealed(1))[:3], bytes(64)]), Reason.SIGNATURE),
    "a bomb": (frame(zlib.compress(bytes(2**26)), key(1)), Reason.DECODE),
    "nested": (forge(b"\x91" * 2**20 + b"\xc0", key(1)), Reason.DECODE),
    "10,000 groups": (forge(tree() | {"groups": tree()["groups"] * 10_000}, key(1)), Reason.SCHEMA),
    "of another swarm": (seal(key(1), batch(swarm="other")).data, Reason.WRONG_SWARM),
    "of another version": (b"\x94\x01" + sealed(1)[2:], Reason.VERSION),
}


@pytest.mark.parametrize("name", list(HOSTILE))
async def test_what_anyone_can_see_is_blamed_on_who_passes_it_on(name: str) -> None:
    """The signer, true or pretended, is blamed for nothing: it may be a batch that was spoiled on its way."""
    data, reason = HOSTILE[name]
    node = Node(Clock(0.0))
    assert node.send(data, BAD) is Verdict.REJECT
    assert only(node.rejected) == (reason, 1)
    counts = node.admission.by_peer.get(BAD)
    assert counts is not None
    assert counts.rejected == {reason: 1}
    for _ in range(30):
        node.send(data, BAD)
    assert node.bans == [BAD]
    assert node.reputation.score(GOOD) == 0
    assert node.send(sealed(5), BAD) is Verdict.IGNORE
    assert node.send(sealed(5), GOOD) is Verdict.ACCEPT


async def test_a_flood_bans_its_sender_within_seconds() -> None:
    clock = Clock(0.0)
    node = Node(clock)
    for number in range(1500):
        clock.time += 0.001
        node.send(sealed(number, signer=2), BAD)
        if node.bans:
            break
    assert node.bans == [BAD]
    assert clock.time < 1.5
    assert node.rejected[Reason.RATE] > 0
    assert node.admission.waiting == 0


async def test_a_fast_honest_node_is_never_touched(autojump_clock: MockClock) -> None:
    node = Node()
    for number in range(1500):
        autojump_clock.jump(1 / 11)
        assert node.send(sealed(number), GOOD) is Verdict.ACCEPT
        if number % 50 == 0:
            await node.settle()
    assert not node.rejected
    assert not node.bans


async def test_a_node_above_its_rate_loses_batches_and_is_not_banned() -> None:
    clock = Clock(0.0)
    node = Node(clock)
    for number in range(2000):
        clock.time += 1 / 30
        node.send(sealed(number), GOOD)
    assert node.rejected[Reason.RATE] > 100
    assert not node.bans


async def test_honest_peers_that_pass_a_flood_on_are_not_blamed() -> None:
    """Honest forwarders let through only so much of a flood, each perhaps another part."""
    clock = Clock(0.0)
    node = Node(clock)
    for second in range(20):
        for place in range(20 * 4):
            clock.time += 1 / 80
            node.send(sealed(second * 80 + place, signer=2), peer(10 + place % 4))
    assert node.rejected[Reason.RATE] > 100
    assert not node.bans


async def test_replaying_bans_who_replays_and_not_the_origin() -> None:
    clock = Clock(0.0)
    node = Node(clock)
    old = [sealed(number) for number in range(20)]
    for data in old:
        node.send(data, GOOD)
    for number in range(1000):
        clock.time += 0.01
        node.send(old[number % 20], BAD)
    assert node.bans == [BAD]
    assert node.rejected[Reason.REPLAY] > 0
    assert node.reputation.score(GOOD) == 0
    assert node.admission.counts.received == 20


async def test_old_batches_poured_out_after_a_restart_cost_their_origin_nothing() -> None:
    """A node that forgot what it saw takes them for new: they are many, and all rightly signed by GOOD."""
    clock = Clock(0.0)
    node = Node(clock)
    for number in range(3000):
        clock.time += 0.001
        node.send(sealed(number), BAD)
    assert node.bans == [BAD]
    assert node.reputation.score(GOOD) == 0
    clock.time += 10
    assert node.send(sealed(4000), OTHER) in (Verdict.ACCEPT, Verdict.IGNORE)
    assert node.reputation.score(OTHER) == 0


async def test_late_and_double_copies_from_honest_peers_are_no_rejections() -> None:
    node = Node(Clock(0.0))
    for number in range(50):
        for forwarder in (GOOD, OTHER, BAD):
            node.send(sealed(number), forwarder)
            node.send(sealed(number), forwarder, requested=True)
            node.send(sealed(number), forwarder, requested=True)
    assert node.admission.counts.duplicates == 50 * 8
    assert not node.rejected
    assert [node.reputation.score(one) for one in (GOOD, OTHER, BAD)] == [0, 0, 0]


async def test_a_neighbour_that_was_restarted_may_pass_things_on_again() -> None:
    node = Node(Clock(0.0))
    for _ in range(5):
        for number in range(50):
            node.send(sealed(number), OTHER)
        node.admission.forget(OTHER)
    assert not node.rejected


async def test_a_catch_up_brings_many_at_once() -> None:
    node = Node(Clock(0.0), settings=AdmissionSettings(queue=800, burst=5))
    for number in range(400):
        assert node.send(sealed(number), OTHER, requested=True) is Verdict.ACCEPT
    assert not node.rejected


async def test_a_catch_up_leaves_room_for_what_is_shared_now() -> None:
    node = Node(Clock(0.0), settings=AdmissionSettings(queue=10))
    for number in range(20):
        verdict = node.send(sealed(number), OTHER, requested=True)
        assert verdict is (Verdict.ACCEPT if number < 5 else Verdict.IGNORE)
    for number in range(20, 25):
        assert node.send(sealed(number), OTHER) is Verdict.ACCEPT
    assert not node.rejected
    assert not node.admission.knows(open_envelope(sealed(19)).id), "it may come again"


@pytest.mark.parametrize("copies", [1, 10_000])
async def test_two_batches_under_one_number_are_blamed_on_their_signer_once(
    copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when so much came since that their bytes are forgotten: whoever keeps them must not add to it."""
    monkeypatch.setattr(admission, "_COPIES", copies)
    node = Node(Clock(0.0))
    first, second = (seal(key(2), batch(7, [group(number)])).data for number in (1, 2))
    assert node.send(first, OTHER) is Verdict.ACCEPT
    for _ in range(40):
        assert node.send(second, OTHER) is Verdict.IGNORE
        node.send(first, GOOD)
    assert only(node.rejected) == (Reason.EQUIVOCATION, 1)
    assert -30 < node.reputation.score(BAD) < 0
    assert node.reputation.score(OTHER) == 0
    for number in range(10, 20):
        node.send(seal(key(2), batch(7, [group(number)])).data, OTHER)
    assert node.bans == [BAD]


async def test_a_banned_origin_is_not_held_against_those_who_pass_it_on() -> None:
    node = Node(Clock(0.0))
    for _ in range(3):
        node.reputation.offence(BAD, Reason.SIGNATURE)
    for number in range(200):
        assert node.send(sealed(number, signer=2), OTHER) is Verdict.IGNORE
    assert only(node.rejected) == (Reason.BANNED, 200)
    assert node.reputation.score(OTHER) == 0


async def test_what_catch_up_asked_a_node_of_another_swarm_for_is_held_against_nobody() -> None:
    """The peer only answered; that it is in another swarm is seen in its answer."""
    node = Node(Clock(0.0))
    data = seal(key(1), batch(swarm="other")).data
    assert node.admission.check(data, BAD, requested=True) is Verdict.IGNORE
    assert node.admission.knows(open_envelope(data).id)
    assert not node.rejected
    assert node.reputation.score(BAD) == 0
