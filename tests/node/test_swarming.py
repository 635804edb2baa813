"""`swarmnode id`, `peers` and `status` of a node in a swarm, and where there is none."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.commands.swarming import NotRunningError, print_id, print_peers
from node.config_sources import load, parse_flag
from node.datadir import DataDir
from node.errors import NodeError
from node.identity import Identity
from node.reach import dialable, own_ips, scope_of
from node.snapshot import Contribution, Lag, PeerRow, Snapshot
from node.status import print_status
from p2p.ids import peer_id_of

ME, FRIEND, FOE = (peer_id_of(bytes([number] * 32)) for number in range(3))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[DataDir]:
    """A data directory that this process holds, as a node does."""
    with DataDir.open(tmp_path / "node") as data:
        Identity.load_or_create(data.identity_path)
        data.write_config(load([parse_flag(f"node.data_dir={data.path}")], environ={}).config)
        yield data


def tell(data: DataDir, *addresses: str, age: float = 0.0, swarm: str = "main") -> None:
    """Write a snapshot with two nodes in it."""
    snapshot = Snapshot(
        time=time.time() - age,
        pid=os.getpid(),
        swarm=swarm,
        peer_id=ME,
        addresses=[f"{address}/p2p/{ME}" for address in addresses],
        connected=1,
        mesh=1,
        sent=12,
        received=40,
        groups=130,
        admitted=118,
        rejected={"wrong_prompt": 2, "rate": 1},
        contribution=Contribution(sent=48, admitted=40, admitted_by=1, trained=31, trained_by=1),
        lag_ms=Lag(p50=0.5, p99=12.0, max=30.0),
        peers=[
            PeerRow(peer=FOE, score=-100.0, banned_seconds=540.0, batches=3, rejected={"wrong_prompt": 2, "rate": 1}),
            PeerRow(
                peer=FRIEND, address="/ip4/192.0.2.7/tcp/4747", connected=True, in_mesh=True, score=20.0, batches=37,
                groups=118, ours_admitted=40, ours_trained=31,
            ),
        ],
    )  # fmt: skip
    data.swarm_path.write_text(snapshot.model_dump_json())


def test_the_id_is_made_before_the_first_start_and_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_id(tmp_path / "new", as_json=False)
    first = capsys.readouterr().out.splitlines()
    assert first[0] == Identity.load(tmp_path / "new" / "identity.key").node_id
    assert "while it runs" in first[-1]
    print_id(tmp_path / "new", as_json=True)
    assert json.loads(capsys.readouterr().out) == {"peer_id": first[0], "addresses": []}


def test_the_id_of_a_running_node_comes_with_what_a_friend_types(
    running: DataDir, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(running, "/ip4/127.0.0.1/tcp/4747", "/ip4/192.168.1.5/tcp/4747", "/ip4/8.8.8.8/tcp/4747", swarm="lab")
    print_id(running.path, as_json=False)
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("swarmnode start")]
    assert commands == [
        f"swarmnode start --swarm lab --join /ip4/{ip}/tcp/4747/p2p/{ME}" for ip in ("8.8.8.8", "192.168.1.5")
    ]


def test_a_node_on_loopback_says_that_nobody_else_can_join(
    running: DataDir, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(running, "/ip4/127.0.0.1/tcp/4747")
    print_id(running.path, as_json=False)
    text = capsys.readouterr().out
    assert f"swarmnode start --join /ip4/127.0.0.1/tcp/4747/p2p/{ME}" in text
    assert "on this machine alone" in text


def test_all_interfaces_stand_for_the_addresses_of_this_machine() -> None:
    places = dialable([f"/ip4/0.0.0.0/tcp/4747/p2p/{ME}", "nonsense"])
    assert {place.host for place in places} == {str(ip) for ip in own_ips() if ip.version == 4}
    assert {place.peer for place in places} == {ME}
    assert scope_of(places[-1]) == "loopback", "the least useful comes last"


def test_the_peers_are_told_with_what_came_of_them(running: DataDir, capsys: pytest.CaptureFixture[str]) -> None:
    tell(running)
    print_peers(running.path, as_json=False)
    head, _, friend, foe = capsys.readouterr().out.splitlines()
    assert "2 nodes known, 1 connected" in head
    assert friend.split() == [
        FRIEND[-8:],
        "connected",
        "yes",
        "20.0",
        "37",
        "118",
        "31",
        "/ip4/192.0.2.7/tcp/4747",
        "-",
    ]
    assert foe.split()[:4] == [FOE[-8:], "banned", "9", "min"]
    assert foe.endswith("wrong_prompt 2, rate 1")
    print_peers(running.path, as_json=True)
    assert [row["peer"] for row in json.loads(capsys.readouterr().out)["peers"]] == [FOE, FRIEND]


def test_a_node_that_stands_still_is_told_apart(running: DataDir, capsys: pytest.CaptureFixture[str]) -> None:
    tell(running, age=35.0)
    print_peers(running.path, as_json=False)
    assert "as of 35 s ago" in capsys.readouterr().out
    print_status(running.path, as_json=False)
    assert "as of 35 s ago" in capsys.readouterr().out


def test_peers_without_a_swarm_is_an_error_that_says_why(running: DataDir) -> None:
    with pytest.raises(NotRunningError, match="has only just started"):
        print_peers(running.path, as_json=False)
    silo = load([parse_flag(f"node.data_dir={running.path}"), parse_flag("sharing.silo=true")], environ={}).config
    running.write_config(silo)
    with pytest.raises(NotRunningError, match="trains alone"):
        print_peers(running.path, as_json=False)
    tell(running)
    running.close()
    with pytest.raises(NotRunningError, match="is not running"):
        print_peers(running.path, as_json=False)
    with pytest.raises(NodeError, match="no node has run in"):
        print_peers(running.path / "typo", as_json=False)


def test_status_shows_the_swarm_while_the_node_runs(running: DataDir, capsys: pytest.CaptureFixture[str]) -> None:
    tell(running, "/ip4/192.0.2.1/tcp/4747")
    print_status(running.path, as_json=False)
    text = capsys.readouterr().out
    for expected in (
        "main: 1 node connected, 1 in the mesh",
        f"/ip4/192.0.2.1/tcp/4747/p2p/{ME}",
        "12 sent, 40 received",
        "130 received, 118 admitted",
        "48 groups sent; peers say: trained on 31 times by 1 of them, admitted 40 times by 1",
        "3 (rate 1, wrong_prompt 2)",
        "12.0 ms p99",
    ):
        assert expected in text
    print_status(running.path, as_json=True)
    status = json.loads(capsys.readouterr().out)
    assert list(status)[-1] == "swarm"
    assert (status["swarm"]["mesh"], status["swarm"]["lag_ms"]["p99"]) == (1, 12.0)
    running.close()
    print_status(running.path, as_json=True)
    assert json.loads(capsys.readouterr().out)["swarm"] is None
