"""Nodes that are killed, come late, stand still, or are cut off: the swarm goes on, and they catch up."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.namespaces import Cable, open_cable
from tests.e2e.nodes import RunningNode, StartNode, wait_for

pytestmark = pytest.mark.slow

LISTEN = ("--listen", "/ip4/127.0.0.1/tcp/0")


def joins(*nodes: RunningNode) -> list[str]:
    """The flags of a node that begins with these."""
    return [word for node in nodes for word in ("--join", node.address())]


def received(node: RunningNode) -> int:
    """Batches that a node has received since it was started."""
    snapshot = node.snapshot()
    return snapshot.received if snapshot is not None else 0


def round_of(node: RunningNode) -> int:
    """The last round a node has recorded."""
    return max(node.rounds(), default=0)


def test_a_swarm_outlives_its_nodes_and_those_that_missed_something_catch_up(
    start_node: StartNode, tmp_path: Path
) -> None:
    def start(name: str, *others: RunningNode) -> RunningNode:
        return start_node(*LISTEN, *joins(*others), data_dir=tmp_path / name, silo=False)

    first = start("first")
    second = start("second", first)
    third = start("third", first, second)
    for node in (first, second, third):
        node.wait_until(lambda node=node: node.is_connected(2) and round_of(node) > 0)  # type: ignore[misc]

    # One is killed: the others go on, and it goes on where it was.
    third.wait_for_round(20)
    third.kill()
    before = round_of(first)
    third = start("third", first, second)
    late = start("late", second)
    third.wait_until(lambda: third.snapshot() is not None)
    wait_for(lambda: received(third) > 0, 10, "for a batch after the restart")
    first.wait_for_round(before + 10)

    # One comes late: it has what was shared before it came.
    late.wait_until(lambda: late.snapshot() is not None)
    old = {group for group, number in first.groups_of(first).items() if number <= before}
    wait_for(lambda: len(old & late.groups_of(first).keys()) > 0.5 * len(old), 10, "for groups from before")
    third.wait_until(lambda: "resuming after round" in third.log())

    # One stands still.
    second.process.send_signal(signal.SIGSTOP)
    begun = round_of(first)
    time.sleep(8)
    ended = round_of(first)
    second.process.send_signal(signal.SIGCONT)
    missed = {group for group, number in first.groups_of(first).items() if begun < number <= ended}
    assert len(missed) >= 20
    wait_for(lambda: len(missed & second.groups_of(first).keys()) >= 0.95 * len(missed), 20, "for what was missed")
    for node in (first, second, third, late):
        assert node.process.poll() is None
        assert all(record["rejected"] == {} for record in node.records())


@pytest.fixture
def cable() -> Iterator[Cable]:
    """Two networks with a cable between them."""
    with open_cable() as made:
        yield made


def test_two_networks_that_were_cut_apart_are_one_swarm_again(
    start_node: StartNode, cable: Cable, tmp_path: Path
) -> None:
    listen = ("--listen", f"/ip4/{cable.left_ip}/tcp/4747")
    left = start_node(*listen, data_dir=tmp_path / "left", namespace=cable.left, silo=False)
    listen = ("--listen", f"/ip4/{cable.right_ip}/tcp/4747")
    right = start_node(*listen, *joins(left), data_dir=tmp_path / "right", namespace=cable.right, silo=False)
    for node in (left, right):
        node.wait_until(lambda node=node: received(node) > 0)  # type: ignore[misc]
    cable.cut()
    time.sleep(10)
    apart = [received(left), received(right)]
    rounds = round_of(left)
    time.sleep(1.5)
    assert [received(left), received(right)] == apart
    assert round_of(left) > rounds, "each goes on by itself"
    cable.heal()
    wait_for(lambda: received(left) > apart[0] and received(right) > apart[1], 15, "for a batch from the other side")
