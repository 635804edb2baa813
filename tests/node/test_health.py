"""`swarmnode status --check`: what a supervisor of containers goes by."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node import health
from node.api.client import NoAnswer
from node.api.contact import Contact, contactable
from node.config_sources import load, parse_flag
from node.datadir import DataDir, DataDirError
from node.health import NotAtWork
from node.snapshot import STALE_SECONDS, Snapshot


@pytest.fixture
def data(tmp_path: Path) -> Iterator[DataDir]:
    """The data directory of a node that runs, which is this process."""
    with DataDir.open(tmp_path / "node") as data:
        yield data


def configured(data: DataDir, *flags: str) -> DataDir:
    """The same, once the node has a learner."""
    data.write_config(load([parse_flag(flag) for flag in flags], environ={}).config)
    return data


def test_where_no_node_runs_none_is_at_work(tmp_path: Path) -> None:
    with pytest.raises(DataDirError, match="no node has run"):
        health.check(tmp_path / "never")
    with DataDir.open(tmp_path / "node") as data:
        configured(data)
    with pytest.raises(NotAtWork, match="no node runs"):
        health.check(tmp_path / "node")


def test_a_node_that_has_not_got_a_learner_yet_is_not_at_work(data: DataDir) -> None:
    with pytest.raises(NotAtWork, match="only just started"):
        health.check(data.path)


def test_a_node_with_an_http_server_is_asked(data: DataDir, monkeypatch: pytest.MonkeyPatch) -> None:
    configured(data)
    with pytest.raises(NoAnswer):
        health.check(data.path)
    status: dict[str, Any] = {"state": "starting", "phase": "load model", "round": 7, "peers": 3}
    monkeypatch.setattr("node.api.client.NodeClient.get", lambda client, name: status)
    with contactable(data.path, Contact(pid=os.getpid(), address="http://127.0.0.1:1")):
        with pytest.raises(NotAtWork, match="still starting: load model"):
            health.check(data.path)
        status["state"], status["phase"] = "training", "generate"
        assert health.check(data.path) == "training, generate, 7 rounds done, 3 connected"


def test_an_http_server_that_does_not_answer_is_no_good_sign(data: DataDir) -> None:
    configured(data)
    with (
        contactable(data.path, Contact(pid=os.getpid(), address="http://127.0.0.1:1")),
        pytest.raises(NoAnswer, match="does not answer"),
    ):
        health.check(data.path)


def test_a_node_without_an_http_server_shows_its_life_in_its_files(data: DataDir) -> None:
    configured(data, "api.dashboard=false")
    snapshot = Snapshot(time=time.time(), pid=os.getpid(), swarm="main", peer_id="me", connected=2)
    data.swarm_path.write_text(snapshot.model_dump_json())
    assert "2 connected" in health.check(data.path)
    old = snapshot.model_copy(update={"time": time.time() - STALE_SECONDS - 5})
    data.swarm_path.write_text(old.model_dump_json())
    with pytest.raises(NotAtWork, match="said nothing"):
        health.check(data.path)


def test_of_a_node_alone_without_an_http_server_only_its_process_is_seen(data: DataDir) -> None:
    configured(data, "api.dashboard=false", "sharing.silo=true")
    assert str(os.getpid()) in health.check(data.path)
