import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rl.checkpoint import CheckpointStore


def write(store: CheckpointStore, number: int, content: str = "weights") -> Path:
    with store.writing(number, {"cursor": number * 10}) as directory:
        (directory / "adapter.bin").write_text(f"{content} {number}")
        (directory / "sub").mkdir()
        (directory / "sub" / "more.bin").write_bytes(bytes(range(256)) * 100)
    return store.directory / f"{number:08d}"


def rounds(store: CheckpointStore) -> list[int]:
    return sorted(int(path.name) for path in store.directory.iterdir())


def test_newest_comes_back_with_its_state(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.newest() is None
    write(store, 10)
    write(store, 20)
    found = CheckpointStore(tmp_path / "checkpoints").newest()
    assert found is not None
    assert (found.round, found.state["cursor"]) == (20, 200)
    assert (found.path / "adapter.bin").read_text() == "weights 20"


def flip(path: Path) -> None:
    data = bytearray((path / "sub" / "more.bin").read_bytes())
    data[5000] ^= 1
    (path / "sub" / "more.bin").write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path / "sub" / "more.bin", 1000)


def lose(path: Path) -> None:
    (path / "adapter.bin").unlink()


def garble(path: Path) -> None:
    (path / "manifest.json").write_bytes(b'{"files": [\xff')


def alter_state(path: Path) -> None:
    (path / "state.json").write_text('{"round": 30}')


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [flip, cut, lose, garble, alter_state, lose_manifest])
def test_a_damaged_one_falls_back_and_says_so(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 10)
    damage(write(store, 20))
    found = store.newest()
    assert found is not None
    assert found.round == 10
    assert [damaged.path.name for damaged in store.damaged] == ["00000020"]
    assert store.damaged[0].reason in caplog.text


def test_all_damaged_is_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    flip(write(store, 1))
    cut(write(store, 2))
    assert store.newest() is None
    assert len(store.damaged) == 2


def test_keeps_the_newest_and_never_loses_the_last_good_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for number in (1, 2, 3):
        write(store, number)
    assert rounds(store) == [2, 3]
    for number in (4, 5):
        flip(write(store, number))
    store.prune()
    assert rounds(store) == [3, 4, 5]
    found = store.newest()
    assert found is not None
    assert found.round == 3


def test_the_same_round_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    flip(write(store, 7))
    path = write(store, 7, "better")
    assert (path / "adapter.bin").read_text() == "better 7"
    assert store.newest() is not None
    assert rounds(store) == [7]


def test_an_error_while_writing_leaves_the_others_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1)

    def fill_the_disk() -> None:
        with store.writing(2, {}) as directory:
            (directory / "half").write_text("half")
            # The one device that is always full.
            Path("/dev/full").write_text("x" * 10_000)

    with pytest.raises(OSError, match="space") as caught:
        fill_the_disk()
    assert caught.value.errno == errno.ENOSPC
    assert rounds(store) == [1]
    assert store.newest() is not None


WRITER = """
import sys
from pathlib import Path
from rl.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=2)
number = int(sys.argv[2])
while True:
    number += 1
    with store.writing(number, {"cursor": number}) as directory:
        (directory / "data").write_bytes(number.to_bytes(4, "big") * 50_000)
    with store.writing(number, {"cursor": number}) as directory:
        (directory / "data").write_bytes(number.to_bytes(4, "big") * 50_000)
    print(number, flush=True)
"""


def test_kill_at_any_moment_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    """A process that saves without pause, each round twice, is killed again and again."""
    number = 0
    for attempt in range(12):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(number)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            number = int(process.stdout.readline())
            # Later by a different time each attempt, so that the kill falls into different steps of a save.
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.0007 * attempt)
            process.send_signal(signal.SIGKILL)
        store = CheckpointStore(tmp_path, keep=2)
        found = store.newest()
        assert found is not None
        assert found.round >= number
        assert not store.damaged
        assert (found.path / "data").read_bytes() == found.round.to_bytes(4, "big") * 50_000
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
        number = found.round


def test_a_replacement_cut_in_two_returns_the_old_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = write(store, 5)
    path.rename(tmp_path / ".replaced-00000005")
    (tmp_path / ".writing-00000005").mkdir()
    again = CheckpointStore(tmp_path)
    found = again.newest()
    assert found is not None
    assert found.round == 5
    assert rounds(again) == [5]
