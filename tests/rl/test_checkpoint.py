import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl import checkpoint
from rl.checkpoint import CheckpointStore


def write(store: CheckpointStore, number: int, content: str = "weights") -> Path:
    directory = store.begin(number)
    (directory / "adapter.bin").write_text(f"{content} {number}")
    (directory / "sub").mkdir()
    (directory / "sub" / "more.bin").write_bytes(bytes(range(256)) * 100)
    store.commit(number, directory, {"cursor": number * 10})
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


def rewrite_manifest(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest["files"])
    (path / "manifest.json").write_text(json.dumps(manifest))


def unlist_state(path: Path) -> None:
    rewrite_manifest(path, lambda files: files.pop("state.json"))


def unlist_and_lose_state(path: Path) -> None:
    unlist_state(path)
    (path / "state.json").unlink()


def list_nothing(path: Path) -> None:
    rewrite_manifest(path, lambda files: files.clear())


def add(path: Path) -> None:
    (path / "sub" / "stranger.bin").write_text("not ours")


def nest(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 100_000)


@pytest.mark.parametrize(
    "damage",
    [flip, cut, lose, garble, alter_state, lose_manifest, unlist_state, unlist_and_lose_state, list_nothing, add, nest],
)
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
    assert rounds(store) == [4, 5]


def test_damaged_ones_never_push_out_the_last_good_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    write(store, 3)
    for number in (4, 5):
        flip(write(store, number))
    again = CheckpointStore(tmp_path, keep=1)
    again.prune()
    found = again.newest()
    assert found is not None
    assert found.round == 3
    assert rounds(again) == [3, 4, 5]
    write(again, 6)
    assert rounds(again) == [6]


def test_a_save_reads_no_checkpoint_but_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(CheckpointStore(tmp_path), 1)
    store = CheckpointStore(tmp_path)
    read: list[str] = []
    fingerprint = checkpoint._fingerprint

    def watch(path: Path) -> dict[str, object]:
        read.append(path.relative_to(tmp_path).parts[0])
        return fingerprint(path)

    monkeypatch.setattr(checkpoint, "_fingerprint", watch)
    write(store, 2)
    assert set(read) == {".writing-00000002", "00000001"}
    read.clear()
    write(store, 3)
    assert set(read) == {".writing-00000003"}


def test_saving_in_a_thread(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(write, store, 1).result()
    assert rounds(store) == [1]


@pytest.mark.parametrize("number", [1, 2])
def test_a_failed_commit_leaves_nothing_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 1)
    with pytest.raises(TypeError):
        store.commit(number, store.begin(number), {"cursor": object()})
    sync = checkpoint._sync

    def fail(path: Path) -> None:
        # The last step, when the new one is in its place already.
        if path == tmp_path:
            raise OSError(errno.EIO, "injected")
        sync(path)

    monkeypatch.setattr(checkpoint, "_sync", fail)
    with pytest.raises(OSError, match="injected"):
        write(store, number, "worse")
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]
    found = store.newest()
    assert found is not None
    assert (found.path / "adapter.bin").read_text() == "weights 1"


def test_what_is_begun_and_left_is_no_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (store.begin(1) / "half").write_text("half")
    assert store.newest() is None
    again = store.begin(1)
    assert not list(again.iterdir())
    store.discard(again)
    store.discard(again)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [".writing-00000002", ".replaced-00000001", ".replaced-00000002"])
@pytest.mark.parametrize("target", [None, "/dev/null", "/"])
def test_leftovers_that_are_no_directories_are_removed(tmp_path: Path, name: str, target: str | None) -> None:
    write(CheckpointStore(tmp_path), 1)
    (tmp_path / name).symlink_to(target) if target else (tmp_path / name).write_text("a file")
    store = CheckpointStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]
    assert store.newest() is not None


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

    directory = store.begin(2)
    # The one device that is always full.
    (directory / "state.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="space") as caught:
        store.commit(2, directory, {"long": "x" * 10_000})
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
    for _ in range(2):
        directory = store.begin(number)
        (directory / "data").write_bytes(number.to_bytes(4, "big") * 50_000)
        store.commit(number, directory, {"cursor": number})
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
