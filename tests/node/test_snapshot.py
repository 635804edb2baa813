"""`swarm.json`: what the running node says of its swarm, and what others make of it."""

import os
import time
from pathlib import Path

import pytest
import trio

from node.heartbeat import Beat, SnapshotFile
from node.snapshot import Lag, PeerRow, Snapshot, read_snapshot

SNAPSHOT = Snapshot(
    time=1.0,
    pid=os.getpid(),
    swarm="main",
    peer_id="me",
    connected=1,
    rejected={"rate": 2},
    lag_ms=Lag(p50=0.1, p99=2.0, max=3.0),
    peers=[PeerRow(peer="other", connected=True)],
)


class Said(list[tuple[str, str]]):
    """What was said, in order."""

    def __call__(self, level: str, text: str) -> None:
        self.append((level, text))


async def test_what_is_written_is_read_back_and_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "swarm.json"
    file = SnapshotFile(path, Said())
    await file.write(SNAPSHOT)
    assert read_snapshot(path, os.getpid()) == SNAPSHOT
    assert [entry.name for entry in tmp_path.iterdir()] == ["swarm.json"]
    file.remove()
    assert not list(tmp_path.iterdir())
    file.remove()


async def test_what_another_process_left_is_no_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "swarm.json"
    assert read_snapshot(path, os.getpid()) is None
    await SnapshotFile(path, Said()).write(SNAPSHOT)
    assert read_snapshot(path, os.getpid() + 1) is None
    assert read_snapshot(path, None) is None, "its node does not run any more"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"time": "x"}', b"\xff"])
def test_a_file_that_is_none_is_passed_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "swarm.json").write_bytes(content)
    assert read_snapshot(tmp_path / "swarm.json", os.getpid()) is None


def test_a_later_version_may_say_more(tmp_path: Path) -> None:
    data = SNAPSHOT.model_dump_json().replace('"swarm"', '"weather":"fine","swarm"')
    (tmp_path / "swarm.json").write_text(data)
    assert read_snapshot(tmp_path / "swarm.json", os.getpid()) == SNAPSHOT


async def test_a_disk_that_takes_nothing_is_a_warning_once(tmp_path: Path) -> None:
    said = Said()
    file = SnapshotFile(tmp_path / "gone" / "swarm.json", said)
    for _ in range(3):
        await file.write(SNAPSHOT)
    assert [level for level, _ in said] == ["warning"]
    file.remove()


async def test_the_beat_notices_a_blocked_event_loop() -> None:
    beat = Beat()
    assert beat.lag() == Lag()
    with trio.move_on_after(0.6):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beat.run)
            await trio.sleep(0.1)
            time.sleep(0.25)  # what must not happen
            await trio.sleep_forever()
    lag = beat.lag()
    assert lag.max > 150
    assert lag.p50 < lag.max / 2
