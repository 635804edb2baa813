"""`bench.gossip`: real nodes carry every batch, and the figures follow from what they saw."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.net.batches import key_of, name_of
from bench.net.measuring import delay_of, speed_of
from bench.net.nodes import Batch, open_plain
from bench.net.runs import Plan, Report
from p2p.ids import peer_id_of
from p2p.wire import Envelope


def batch(node: int, number: int) -> Batch:
    data = bytes([node, number]) * 500
    return Batch(Envelope(data, b"", "", None), [], number)  # type: ignore[arg-type]


def test_speed_counts_from_the_first_publication_to_the_last_arrival_and_what_is_lost() -> None:
    plan = Plan(open_plain, 2, [[batch(0, number) for number in range(1, 5)]], 2)
    sender = Report(began=[10.0, 10.1, 10.2, 10.3], cpu=0.4)
    names = [name_of(one.envelope.data) for one in plan.batches[0]]
    listener = Report(arrived=[(names[0], 10.5), (names[1], 11.0), (names[2], 11.5)], cpu=0.8)
    speed = speed_of(plan, [sender, listener])
    assert speed.batches == pytest.approx(3 / 1.5)
    assert speed.bytes == pytest.approx(3 / 1.5 * 1000)
    assert (speed.send_cpu, speed.receive_cpu) == pytest.approx((0.1, 0.2))
    assert speed.lost == pytest.approx(0.25)


def test_delays_are_from_a_batch_to_its_own_arrival_and_place_in_the_pool() -> None:
    plan = Plan(open_plain, 2, [[batch(0, 1), batch(0, 2)]], 0, rate=2)
    first, second = (name_of(one.envelope.data) for one in plan.batches[0])
    origin = peer_id_of(key_of(0).public_key().public_bytes_raw())
    sender = Report(began=[1.0, 2.0], sent=[(first, 1.5), (second, 2.5)])
    listener = Report(arrived=[(second, 2.75), (first, 1.75)], stored=[(origin, 2, 4.0), (origin, 1, 3.0)])
    delay = delay_of(plan, [sender, listener])
    assert delay.arrived == pytest.approx((0.25, 0.25, 0.25))
    assert delay.stored == pytest.approx((2.0, 2.0, 2.0))
    assert (delay.lost, delay.unstored) == (0, 0)


def test_nodes_stand_in_a_ring_of_six_neighbours() -> None:
    plan = Plan(open_plain, 16, [], 1)
    dialled = {number: plan.neighbours(number) for number in range(16)}
    for number in range(16):
        dialling = {other for other, whom in dialled.items() if number in whom}
        assert len(dialling | set(dialled[number])) == plan.degree == 6


@pytest.mark.slow
def test_real_nodes_of_every_kind_carry_every_batch(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "bench.gossip", "--smoke", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(path.read_text())
    fast, steady = found["fast"]["2"]["32"], found["steady"]["2"]["32"]
    assert {kind: fast[kind]["lost"] for kind in ("tcp", "gossip", "relay")} == {"tcp": 0, "gossip": 0, "relay": 0}
    assert fast["libp2p"]["batches"] > 0
    assert steady["node"]["unstored"] == 0
    assert steady["node"]["stored"] is not None
    assert min(found["stages"]["32"].values()) >= 0
    assert found["admits"]["32"]["stored"] > 0
    assert found["admits"]["32"]["lost"] == 0
    assert "| 32 | 8 x 8 x " in done.stdout
