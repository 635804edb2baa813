"""What others say they did with this node's groups: how much of it counts, and that it is not forgotten."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from p2p.contribution import MAX_PEERS, Contribution, Told
from p2p.memory import MemoryNetwork
from p2p.schema import MAX_USES
from p2p.transport import Verdict
from p2p.wire import Use, WireGroup, seal
from tests.p2p.admitting import GOOD, OWN, TRAIN, Node
from tests.p2p.forging import batch, group, key, peer, ref
from tests.p2p.test_swarm import Node as Member
from tests.p2p.test_swarm import connected, groups, swarm

MUCH = 2**62


def told(node: Node, number: int, uses: Sequence[Use], signer: int = 1, only: WireGroup | None = None) -> bytes:
    """A batch that tells of `uses`, given to a node."""
    one = only or group(TRAIN[number], ["right", "wrong", f"{signer}"])
    data = seal(key(signer), batch(number, [one], uses=tuple(uses))).data
    assert node.send(data, GOOD) is Verdict.ACCEPT
    return data


async def test_nodes_hear_what_became_of_their_groups(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    async with swarm(MemoryNetwork(nursery), 3) as (first, second, third):
        await trio.sleep(30)
        assert await first.swarm.share(groups(0, 10), 1) == 1
        await trio.sleep(1)
        second.swarm.trained({first.peer: 3})
        third.swarm.trained({first.peer: 2})
        assert first.swarm.status().contribution == Told(sent=10)
        # Once in each batch that follows: the second of them has nothing new to tell.
        for number in range(2):
            await second.swarm.share(groups(100 + 10 * number, 5), number)
            await third.swarm.share(groups(200 + 10 * number, 5), number)
            await trio.sleep(1)
        assert first.swarm.status().contribution == Told(10, admitted=20, admitted_by=2, trained=5, trained_by=2)
        rows = {row.peer: (row.ours_admitted, row.ours_trained) for row in first.swarm.status().peers}
        assert rows == {second.peer: (10, 3), third.peer: (10, 2)}
        assert first.swarm.totals().rejected == {}


async def test_it_outlasts_a_restart_and_a_repeated_batch_counts_once(
    nursery: trio.Nursery, autojump_clock: MockClock, tmp_path: Path
) -> None:
    async with swarm(MemoryNetwork(nursery), 1 + 1) as (other, _):
        node = Member(other.network, 3, [other], tmp_path)
        expected = Told(4, admitted=4, admitted_by=1, trained=4, trained_by=1)
        async with node.opened() as node.swarm:
            await connected(node)
            await node.swarm.share(groups(0, 4), 1)
            await trio.sleep(1)
            other.swarm.trained({node.peer: 4})
            await other.swarm.share(groups(100, 4), 1)
            await trio.sleep(1)
            assert node.swarm.status().contribution == expected
        async with node.opened() as node.swarm:
            # Catch-up brings the other's batch once more.
            await trio.sleep(30)
            assert node.swarm.totals().groups_admitted == 4
            assert node.swarm.status().contribution == expected


async def test_nobody_can_say_more_than_was_sent(autojump_clock: MockClock) -> None:
    node = Node()
    told(node, 1, [Use(OWN, MUCH, MUCH)])
    await node.settle()
    assert node.contribution.told() == Told()
    node.contribution.sent(5)
    for number in range(2, 6):
        told(node, number, [Use(OWN, MUCH + number, MUCH)])
    told(node, 7, [Use(OWN, 2, 1)], signer=2)
    # Less than before, as after a lost disk, takes nothing back.
    told(node, 8, [Use(OWN, 1, 0)], signer=2)
    await node.settle()
    assert node.contribution.told() == Told(5, admitted=7, admitted_by=2, trained=6, trained_by=2)
    # It is a claim, and changes nothing of what is thought of a peer.
    assert node.reputation.score(peer(1)) < 1


async def test_who_samples_nothing_says_nothing(autojump_clock: MockClock) -> None:
    node = Node()
    node.contribution.sent(5)
    for place, wrong in enumerate((group(1, at=ref(1, verifier="another")), group(1, prompt="another"))):
        told(node, place, [Use(OWN, 5, 5)], signer=10 + place, only=wrong)
    await node.settle()
    assert node.contribution.told() == Told(5)


def test_a_replayed_claim_counts_once() -> None:
    contribution = Contribution(None, OWN)
    contribution.sent(5)
    for _ in range(3):
        contribution.hear(GOOD, [Use(OWN, 2, 1), Use(peer(3), 5, 5)])
    contribution.hear(OWN, [Use(OWN, 5, 5)])
    assert contribution.told() == Told(5, admitted=2, admitted_by=1, trained=1, trained_by=1)


def test_thousands_of_peers_fill_nothing_and_do_not_push_out_those_that_count(tmp_path: Path) -> None:
    path = tmp_path / "contribution.json"
    contribution = Contribution(path, OWN)
    contribution.sent(100)
    contribution.hear(peer(1), [Use(OWN, 90, 80)])
    contribution.admitted(peer(1), 90)
    for number in range(2, 4 * MAX_PEERS):
        contribution.hear(peer(number), [Use(OWN, 1, 1)])
        contribution.admitted(peer(number), 1)
    assert len(contribution.dump()) < 2**18
    assert len(contribution.reporters()) < 2 * MAX_PEERS
    assert contribution.told_by(peer(1)) == (90, 80)
    path.write_bytes(contribution.dump())
    again = Contribution(path, OWN)
    again.load()
    assert again.told() == contribution.told()
    # And what there is to tell of them is told bit by bit, each node once.
    heard: list[Use] = []
    while uses := again.news():
        assert len(uses) <= MAX_USES
        again.is_told(uses)
        heard += uses
    assert len({use.peer for use in heard}) == len(heard) == len(json.loads(contribution.dump())["used"])
    assert Use(peer(1), 90, 0) in heard


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"version": 1, "sent": 1, "used": {"me": {}}, "told": {}}'])
def test_a_damaged_file_is_put_aside_and_said(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "contribution.json"
    path.write_bytes(damage)
    said: list[str] = []
    contribution = Contribution(path, OWN, lambda level, text: said.append(f"{level}: {text}"))
    contribution.load()
    assert contribution.told() == Told()
    assert len(said) == 1
    assert said[0].startswith("warning:")
    assert (tmp_path / "contribution.json.damaged").read_bytes() == damage
