"""The data directory belongs to one node at a time."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from node.config import Config
from node.config_sources import load_run
from node.datadir import DataDir, DataDirError, write_atomically

HOLD = """
import sys, time
from pathlib import Path
from node.datadir import DataDir
with DataDir.open(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def hold(path: Path) -> subprocess.Popen[str]:
    """Another process that has the directory."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_node_is_refused_with_path_and_process_until_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "node"
    first = hold(path)
    try:
        assert DataDir.look(path).running() == first.pid
        with pytest.raises(DataDirError) as refused:
            DataDir.open(path)
        assert str(path) in str(refused.value)
        assert str(first.pid) in str(refused.value)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert first.stdout is not None
        first.stdout.close()
    assert DataDir.look(path).running() is None
    with DataDir.open(path):
        assert DataDir.look(path).running() == os.getpid()
    assert DataDir.look(path).running() is None


def test_others_cannot_look_into_it(tmp_path: Path) -> None:
    path = tmp_path / "node"
    with DataDir.open(path) as data:
        data.write_config(Config())
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE(data.config_path.stat().st_mode) == 0o600
        assert load_run(data.config_path).config == Config()


def test_what_is_no_directory_or_cannot_be_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        with pytest.raises(DataDirError, match=r"is not a directory.*--data-dir"):
            DataDir.open(path)
    with pytest.raises(DataDirError, match="no node has run in"):
        DataDir.look(tmp_path / "missing")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_of_somebody_else_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DataDirError, match="is not writable by this user"):
        DataDir.open(tmp_path / "node")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    # A process with a limit on file sizes meets the same error as one on a full disk: write fails half-way.
    script = (
        "import resource, sys; from pathlib import Path; from node.datadir import write_atomically\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "write_atomically(Path(sys.argv[1]), b'x' * 1000)"
    )
    path = tmp_path / "file"
    write_atomically(path, b"old")
    failed = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert "OSError" in failed.stderr
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_killed_writers_left_is_swept_away_at_the_next_start(tmp_path: Path) -> None:
    mine = (
        ".identity.key.a1b2c3d4",
        ".config.toml.zzzzzzzz",
        ".peers.json._x0_x0_x",
        ".reputation.json.12345678",
        ".contribution.json.87654321",
    )
    others = (".evaluation.json.a1b2c3d4", ".config.toml.swp", "identity.key", "peers.json.damaged", ".x.12345678")
    for name in (*mine, *others):
        (tmp_path / name).touch()
    with DataDir.open(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {*others, "lock"}
    (tmp_path / mine[0]).touch()
    DataDir.look(tmp_path)
    assert (tmp_path / mine[0]).exists(), "only the node that holds the lock may"
