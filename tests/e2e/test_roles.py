"""Nodes that do not train: one that samples and shares, and a relay without a model."""

import signal
from pathlib import Path

import psutil
import pytest

from node.snapshot import Snapshot
from tests.e2e.nodes import QUICK, RunningNode, StartNode

pytestmark = pytest.mark.slow

RELAY = ("--relay", "--listen", "/ip4/127.0.0.1/tcp/0")
SAMPLING = ("--set", "training.train=false", "--set", "evaluation.every=2", "--set", "checkpoint.every=2", *QUICK)


def told(node: RunningNode) -> Snapshot:
    """What the node says of its swarm once it says anything."""
    node.wait_until(lambda: node.snapshot() is not None)
    snapshot = node.snapshot()
    assert snapshot is not None
    return snapshot


def test_a_node_that_does_not_train_shares_through_a_relay_that_has_no_model(
    start_node: StartNode, tmp_path: Path
) -> None:
    relay = start_node(*RELAY, data_dir=tmp_path / "relay", silo=False)
    address = relay.address()
    node = start_node(*SAMPLING, "--join", address, "--rounds", "4", silo=False)
    assert node.wait() == 0
    assert node.rounds() == [1, 2, 3, 4]
    for record in node.records():
        assert (record["policy_step"], record["tokens_trained"], record["loss"]) == (0, 0, None)
        assert record["tokens_generated"] > 0
        assert record["batches_sent"] == 1
    assert "does not learn" in node.log()
    assert " failed" not in node.log()
    assert not (node.data_dir / "evaluations.jsonl").exists()

    relay.wait_until(lambda: told(relay).received == 4)
    assert (told(relay).held, told(relay).admitted, told(relay).rejected) == (4, 0, {})
    assert relay.children() == []
    loaded = {Path(one.path).name for one in psutil.Process(relay.process.pid).memory_maps()}
    assert not [name for name in loaded if name.startswith(("libtorch", "_C."))]
    assert sorted(path.name for path in relay.data_dir.iterdir() if path.suffix == ".sqlite") == []
    relay.process.send_signal(signal.SIGTERM)
    assert relay.wait(30) == 0
