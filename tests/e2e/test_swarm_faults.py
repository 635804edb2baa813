"""Nodes that are killed, come late, stand still, or are cut off: the swarm goes on, and they catch up."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.testnet.plan import NodePlan, Wishes, make_plans
from tests.e2e.namespaces import Cable, open_cable
from tests.e2e.nodes import RunningNode, StartNode, wait_for, wait_for_growth

pytestmark = pytest.mark.slow


def joins(*plans: NodePlan) -> list[str]:
    """The flags of a node that begins with these."""
    return [word for plan in plans for word in ("--join", plan.address)]


def listens(plan: NodePlan) -> tuple[str, str]:
    """The flag of the node that has the plan's address."""
    return ("--listen", plan.address.partition("/p2p/")[0])


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
    one, two, three, four = make_plans(Wishes(nodes=4, directory=str(tmp_path)))

    def start(plan: NodePlan, *others: NodePlan) -> RunningNode:
        return start_node(*listens(plan), *joins(*others), data_dir=plan.data_dir, silo=False)

    first, second, third = start(one), start(two, one), start(three, one, two)
    for node in (first, second, third):
        node.wait_until(lambda node=node: node.is_connected(2) and round_of(node) > 0)  # type: ignore[misc]

    # One is killed: the others go on, and it goes on where it was.
    third.wait_for_round(20)
    third.kill()
    before = round_of(first)
    third = start(three, one, two)
    late = start(four, two)
    third.wait_until(third.is_connected)
    wait_for(lambda: received(third) > 0, 10, "for a batch after the restart")
    first.wait_for_round(before + 10)

    # One comes late: it has what was shared before it came.
    late.wait_until(lambda: (now := late.snapshot()) is not None and now.admitted > 0)
    old = {group for group, number in first.groups_of(first).items() if number <= before}
    wait_for_growth(lambda: len(old & late.groups_of(first).keys()), 0.5 * len(old) + 1, 10, "groups from before")
    third.wait_until(lambda: "resuming after round" in third.log())

    # One stands still.
    second.process.send_signal(signal.SIGSTOP)
    begun = round_of(first)
    first.wait_for_round(begun + 20)
    ended = round_of(first)
    second.process.send_signal(signal.SIGCONT)
    missed = {group for group, number in first.groups_of(first).items() if begun < number <= ended}
    assert len(missed) >= 20
    wait_for_growth(lambda: len(missed & second.groups_of(first).keys()), 0.95 * len(missed), 20, "missed groups")
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
    def start(ip: str, namespace: str, *arguments: str) -> RunningNode:
        listen = ("--listen", f"/ip4/{ip}/tcp/4747")
        return start_node(*listen, *arguments, data_dir=tmp_path / namespace, namespace=namespace, silo=False)

    left = start(cable.left_ip, cable.left)
    right = start(cable.right_ip, cable.right, "--join", f"/ip4/{cable.left_ip}/tcp/4747")
    for node in (left, right):
        node.wait_until(lambda node=node: received(node) > 0)  # type: ignore[misc]
    cable.cut()
    time.sleep(8)
    apart = [received(left), received(right)]
    rounds = round_of(left)
    time.sleep(1.5)
    assert [received(left), received(right)] == apart
    assert round_of(left) > rounds, "each goes on by itself"
    cable.heal()
    wait_for(lambda: received(left) > apart[0] and received(right) > apart[1], 15, "for a batch from the other side")
