"""`swarm.json`, which `swarmnode status` and `peers` read."""

from node.snapshot import PeerRow, Snapshot, read_snapshot
from tests.fuzz.scratch import directory

PATH = directory() / "swarm.json"


def seeds() -> list[bytes]:
    row = PeerRow(peer="12D3KooWpeer", address="/ip4/203.0.113.1/tcp/4747", rejected={"rate": 3})
    some = Snapshot(time=1.8e9, pid=7, swarm="main", peer_id="12D3KooWself", addresses=["/ip4/..."], peers=[row])
    return [some.model_dump_json().encode()]


def run(data: bytes) -> None:
    PATH.write_bytes(data)
    found = read_snapshot(PATH, 7)
    assert found is None or (found.pid == 7 and found.age >= 0)
