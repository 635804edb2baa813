"""What `swarmnode doctor` says of the network, without touching it."""

import json
import os
import socket
import time
from pathlib import Path

import pytest

from node.config import CheckedNetworkSettings, Config
from node.config_sources import load, parse_flag
from node.datadir import DataDir
from node.doctor import examine
from node.doctor_network import Check, check_network
from node.snapshot import Snapshot

LOOPBACK = 'network.listen=["/ip4/127.0.0.1/tcp/0"]'


def checks(path: Path, *settings: str) -> dict[str, Check]:
    """By name."""
    config = load([parse_flag(text) for text in (f"node.data_dir={path}", *settings)], environ={}).config
    return by_name(config)


def by_name(config: Config) -> dict[str, Check]:
    return {check.name: check for check in check_network(config)}


def test_it_says_who_can_reach_the_node_and_what_to_do(tmp_path: Path) -> None:
    alone = checks(tmp_path, LOOPBACK)
    assert (alone["network"].state, alone["port"].state) == ("ok", "ok")
    assert "from this machine alone" in alone["reach"].text
    local = checks(tmp_path, LOOPBACK, 'network.announce=["/ip4/192.168.1.5/tcp/4747"]')["reach"]
    assert local.state == "note"
    assert "forward TCP port" in local.text
    public = checks(tmp_path, LOOPBACK, 'network.announce=["/dns4/node.example.org/tcp/4747"]')["reach"]
    assert (public.state, "from anywhere" in public.text) == ("ok", True)


def test_a_port_that_is_taken_matters_only_if_it_was_chosen(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"
        assert checks(tmp_path, f'network.listen=["{address}"]')["port"].state == "fail"
        usual = CheckedNetworkSettings.model_construct(listen=[address], _fields_set=set())
        config = load([parse_flag(f"node.data_dir={tmp_path}")], environ={}).config
        assert by_name(config.model_copy(update={"network": usual}))["port"].state == "note"


def test_of_a_running_node_it_tells_what_that_says_of_itself(tmp_path: Path) -> None:
    with DataDir.open(tmp_path) as data:
        addresses = ["/ip4/8.8.8.8/tcp/4747"]
        running = Snapshot(
            time=time.time(), pid=os.getpid(), swarm="lab", peer_id="me", addresses=addresses, connected=2
        )
        data.swarm_path.write_text(running.model_dump_json())
        found = checks(tmp_path)
    assert "swarm lab" in found["port"].text
    assert "2 nodes" in found["port"].text
    assert "/ip4/8.8.8.8/tcp/4747" in found["reach"].text


def test_a_relay_needs_no_model_and_no_verifiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (f"node.data_dir={tmp_path}", LOOPBACK, "node.relay=true", "model.name=/nowhere")
    assert examine(load([parse_flag(text) for text in flags], environ={}).config, as_json=True) == 0
    names = [check["name"] for check in json.loads(capsys.readouterr().out)]
    assert "relay" in names
    assert not {"model", "engine", "sandbox", "tasks"} & set(names)


def test_alone_there_is_nothing_to_check(tmp_path: Path) -> None:
    assert list(checks(tmp_path, "sharing.silo=true")) == ["network"]
