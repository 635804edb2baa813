"""What the rounds take from the network: counts since the round before, and a pool that forgets no use."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from node.disk import Disk
from node.exchange import Counts, CurrentRound, DurablePool, Silent
from node.stop import Stop
from p2p.reasons import Reason
from rl.pool import SqlitePool
from tests.node.records import scored_group


def test_a_round_is_told_what_came_since_the_one_before() -> None:
    rejected: Counter[Reason] = Counter()
    network = SimpleNamespace(peers=2, batches_received=5, rejected=rejected)
    before = Counts.of(network)
    rejected[Reason.STALE] += 2
    network.batches_received, network.peers = 7, 1
    after = Counts.of(network)
    assert after.since(before) == Counts(1, 2, {"stale": 2})
    assert after.since(after) == Counts(1, 0, {})


async def test_a_silent_network_hears_and_says_nothing() -> None:
    silent = Silent()
    assert await silent.share([scored_group()], 1) == 0
    assert silent.totals() == Counts(0, 0, {})


async def test_what_was_chosen_is_chosen_no_more_until_its_round_is_done_again(tmp_path: Path) -> None:
    current = CurrentRound(4)
    with SqlitePool(tmp_path / "pool.sqlite", "another") as kept:
        pool = DurablePool(kept, Disk(tmp_path, 0, Stop(), lambda level, text: None))
        await pool.add([scored_group()])
        [candidate] = await pool.candidates(since=1, reuse=1)
        assert list(await pool.take([candidate.id])) == [candidate.id]
        await pool.settle([candidate.id], [], current())
        assert await pool.candidates(since=1, reuse=1) == []
        kept.rewind(3)
        assert await pool.candidates(since=1, reuse=1) == [candidate]
