"""What is taken from others, and in what shape it reaches the pool."""

import pytest
import trio
from trio.testing import MockClock

from p2p.admission import MAX_WAITING
from p2p.gossip import shard_of
from p2p.reasons import Reason
from p2p.reputation import WEIGHTS
from p2p.settings import AdmissionSettings
from p2p.transport import Verdict
from p2p.wire import WireGroup, open_envelope, seal
from tests.p2p.admitting import BAD, GOOD, OTHER, OWN, TRAIN, Node, sealed
from tests.p2p.fakes import FakeTasks, numbers, only
from tests.p2p.forging import NOW, batch, group, key, peer, ref


async def test_a_good_group_reaches_the_pool_with_this_nodes_own_rewards(autojump_clock: MockClock) -> None:
    node = Node()
    sent = [group(TRAIN[0], ["right", "wrong", "right", "wrong"]), group(TRAIN[1], ["wrong"] * 5)]
    assert node.send(seal(key(1), batch(1, sent)).data, OTHER) is Verdict.ACCEPT
    await node.settle()
    first, second = node.pool.groups
    assert (first.origin, first.round, first.rewards) == (GOOD, 12, (1, 0, 1, 0))
    assert first.advantages == pytest.approx((1, -1, 1, -1), rel=0.01)
    assert second.advantages == (0,) * 5
    assert first.group.completions == sent[0].completions
    assert first.group.policy_step == 3
    assert first.group.task.answer == "right"
    counts = node.admission.counts
    assert (counts.received, counts.groups, counts.admitted, counts.duplicates) == (1, 2, 2, 0)
    assert not counts.rejected
    assert node.admission.by_peer.get(GOOD) == counts
    assert node.reputation.score(GOOD) > 0
    assert node.reputation.score(OTHER) == 0


WRONG: dict[Reason, WireGroup] = {
    Reason.WRONG_PROMPT: group(TRAIN[5], prompt="What is the answer? It is right."),
    Reason.UNKNOWN_TASK: group(TRAIN[5], at=ref(TRAIN[5], verifier="another")),
    Reason.NO_SUCH_TASK: group(TRAIN[5], at=ref(TRAIN[5], config="do none")),
    Reason.HELD_OUT: group(numbers(held_out=True)(1)[0]),
    Reason.TOO_LONG: group(TRAIN[5], ["right", "x" * 2**16]),
    Reason.UNSCORABLE: group(TRAIN[5], at=ref(TRAIN[5], config="do fail")),
    Reason.OVERLOADED: group(TRAIN[5], at=ref(TRAIN[5], config="do ill")),
}


@pytest.mark.parametrize("reason", list(WRONG))
async def test_a_wrong_group_spoils_itself_and_costs_its_origin(autojump_clock: MockClock, reason: Reason) -> None:
    node = Node()
    sent = [group(TRAIN[0]), WRONG[reason], group(TRAIN[1])]
    assert node.send(seal(key(2), batch(1, sent)).data, OTHER) is Verdict.ACCEPT
    await node.settle()
    assert node.pool.prompts(BAD) == [f"question {TRAIN[0]}", f"question {TRAIN[1]}"]
    assert only(node.rejected) == (reason, 1)
    assert node.reputation.score(BAD) == pytest.approx(0.2 - WEIGHTS[reason], rel=0.01)
    assert node.reputation.score(OTHER) == 0


@pytest.mark.parametrize("reason", [Reason.WRONG_PROMPT, Reason.NO_SUCH_TASK, Reason.HELD_OUT])
async def test_an_origin_of_many_wrong_groups_is_banned_and_its_queue_dropped(
    autojump_clock: MockClock, reason: Reason
) -> None:
    node = Node()
    for sequence in range(10):
        node.send(seal(key(2), batch(sequence, [WRONG[reason]] * 4)).data)
    await node.settle()
    assert node.bans == [BAD]
    assert node.rejected[reason] == 10
    assert node.admission.waiting == 0
    assert node.send(sealed(77, signer=2), OTHER) is Verdict.IGNORE
    assert node.rejected[Reason.BANNED] > 0
    assert node.reputation.score(OTHER) == 0


async def test_this_machines_own_trouble_is_said_once_and_blamed_on_nobody(autojump_clock: MockClock) -> None:
    node = Node()
    for sequence in range(60):
        node.send(seal(key(2), batch(sequence, [WRONG[Reason.OVERLOADED]] * 5)).data)
    await node.settle()
    assert len(node.said) == 1
    assert node.reputation.score(BAD) == 0


async def test_a_peer_runs_the_owners_programs_with_the_owners_parameters_only(autojump_clock: MockClock) -> None:
    node = Node(own_task=lambda told: told.config == '{"name":"mine"}')
    for sequence, config in enumerate(('{"name":"mine"}', '{"name":"mine","path":"/etc/passwd"}')):
        task = ref(TRAIN[0], config=config, verifier="command")
        node.send(seal(key(1), batch(sequence, [group(TRAIN[0], at=task)])).data)
    await node.settle()
    assert [one.group.task.ref.config for one in node.pool.groups] == ['{"name":"mine"}']
    assert only(node.rejected) == (Reason.UNKNOWN_TASK, 1)


async def test_a_group_counts_once_for_each_origin(autojump_clock: MockClock) -> None:
    node = Node()
    one = group(TRAIN[0])
    node.send(seal(key(1), batch(1, [one, one])).data)
    node.send(seal(key(1), batch(2, [one])).data)
    node.send(seal(key(3), batch(1, [one])).data)
    await node.settle()
    assert [scored.origin for scored in node.pool.groups] == [GOOD, OTHER]
    assert node.admission.counts.duplicates == 2
    assert not node.rejected
    assert len(node.tasks.scored) == 2


async def test_a_wrong_group_costs_each_time_it_is_sent(autojump_clock: MockClock) -> None:
    node = Node()
    node.send(seal(key(2), batch(1, [WRONG[Reason.WRONG_PROMPT]] * 3)).data)
    await node.settle()
    assert only(node.rejected) == (Reason.WRONG_PROMPT, 3)


async def test_a_slow_group_ends_and_the_next_origin_gets_its_turn(autojump_clock: MockClock) -> None:
    node = Node()
    hanging = [group(TRAIN[n], at=ref(TRAIN[n], config="do hang")) for n in range(64)]
    node.send(seal(key(2), batch(1, hanging)).data)
    node.send(sealed(1))
    async with node.running():
        await trio.sleep(100)
        assert node.pool.prompts(GOOD)
        assert node.rejected[Reason.UNSCORABLE] == 1
        assert node.rejected[Reason.CAPPED] == 63


async def test_an_origin_gets_its_share_of_the_sandbox_and_no_more(autojump_clock: MockClock) -> None:
    """A tenth of each second is 6 s at once, being a minute's worth, and 6 s more in the next minute."""
    node = Node(tasks=FakeTasks(seconds=1.0), settings=AdmissionSettings(seconds_per_second=0.1))
    for number in range(64):
        node.send(sealed(number, signer=2))
    async with node.running():
        await trio.sleep(60)
        greedy = len(node.pool.prompts(BAD))
        assert greedy == pytest.approx(6 + 6, abs=2)
        begun = trio.current_time()
        node.send(sealed(1))
        while not node.pool.prompts(GOOD):
            await trio.sleep(0.1)
        assert trio.current_time() - begun < 3


async def test_origins_take_turns(autojump_clock: MockClock) -> None:
    node = Node(tasks=FakeTasks(seconds=0.01))
    for number in range(40):
        node.send(sealed(number, signer=2))
    node.send(sealed(0, signer=1))
    node.send(sealed(0, signer=3))
    await node.settle()
    assert {one.origin for one in node.pool.groups[:3]} == {GOOD, BAD, OTHER}


async def test_what_waits_is_bounded_and_the_few_of_one_find_room(autojump_clock: MockClock) -> None:
    node = Node()
    for signer in range(10, 20):
        for number in range(70):
            node.send(sealed(number, signer))
    assert node.admission.waiting == MAX_WAITING
    assert node.send(sealed(1)) is Verdict.ACCEPT
    assert node.admission.waiting == MAX_WAITING
    assert node.rejected[Reason.OVERLOADED] > 0
    await node.settle()
    assert len(node.pool.prompts(GOOD)) == 1
    assert all(node.reputation.score(peer(signer)) >= 0 for signer in range(10, 20))


async def test_a_batch_that_found_no_room_may_come_again(autojump_clock: MockClock) -> None:
    node = Node(settings=AdmissionSettings(queue=2))
    late = sealed(3)
    assert [node.send(data) for data in (sealed(1), sealed(2), late)][-1] is Verdict.IGNORE
    assert not node.admission.knows(open_envelope(late).id)
    await node.settle()
    assert node.send(late, requested=True) is Verdict.ACCEPT


async def test_only_peers_of_the_shards_that_are_heard_are_taken() -> None:
    """Also of those that were asked for: one key must not be heard by a whole swarm."""
    node = Node(shards=(10, [shard_of(GOOD, 10)]))
    assert shard_of(BAD, 10) != shard_of(GOOD, 10)
    assert node.send(sealed(1)) is Verdict.ACCEPT
    assert node.send(sealed(1, signer=2)) is Verdict.IGNORE
    assert node.send(sealed(2, signer=2), requested=True) is Verdict.IGNORE
    assert only(node.rejected) == (Reason.WRONG_SHARD, 2)
    assert node.reputation.score(BAD) == node.reputation.score(GOOD) == 0


async def test_only_peers_on_the_list_are_heard() -> None:
    node = Node(allow=[GOOD])
    assert node.send(sealed(1)) is Verdict.ACCEPT
    assert node.send(sealed(1, signer=2)) is Verdict.IGNORE
    assert only(node.rejected) == (Reason.NOT_ALLOWED, 1)
    assert node.reputation.score(BAD) == node.reputation.score(GOOD) == 0


async def test_own_batches_that_come_back_are_no_news() -> None:
    node = Node()
    for number in range(300):
        assert node.send(sealed(number, signer=100)) is Verdict.IGNORE
    assert not node.rejected
    assert node.admission.counts.received == node.admission.counts.duplicates == 0
    assert node.admission.by_peer.get(OWN) is None


@pytest.mark.parametrize("age", [25 * 3600, 10**8, -3 * 3600, -(10**8)])
async def test_batches_from_another_time_are_left(age: float) -> None:
    node = Node()
    assert node.send(sealed(1, created=NOW - age)) is Verdict.IGNORE
    assert only(node.rejected) == (Reason.STALE, 1)
    assert node.reputation.score(GOOD) == 0


@pytest.mark.parametrize("age", [23 * 3600, -1.9 * 3600])
async def test_clocks_may_differ(age: float) -> None:
    assert Node().send(sealed(1, created=NOW - age)) is Verdict.ACCEPT


async def test_what_was_taken_or_refused_for_good_is_known() -> None:
    node = Node()
    for data in (sealed(1), sealed(2, created=0.0)):
        node.send(data)
        assert node.admission.knows(open_envelope(data).id)
    assert [envelope.data for envelope in node.accepted] == [sealed(1)]
    assert not node.admission.knows(open_envelope(sealed(3)).id)
