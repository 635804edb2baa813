"""Nothing outlives its node, at whatever moment it is killed."""

import time

import psutil
import pytest

from tests.e2e.nodes import QUICK, StartNode

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3])
def test_a_node_killed_while_its_learner_starts_leaves_nothing(start_node: StartNode, delay: float) -> None:
    node = start_node(*QUICK)
    node.wait_until(lambda: bool(node.children("rl.learner_child")))
    time.sleep(delay)
    children = node.children()
    node.kill()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
