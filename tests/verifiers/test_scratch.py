"""Directories that are gone when the process is, however it went."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from verifiers.scratch import scratch_directory

HOLDER = """
import time
from verifiers.scratch import scratch_directory
with scratch_directory() as path:
    (path / "empty").mkdir(mode=0o500)
    (path / "log").write_text("x")
    print(path, flush=True)
    time.sleep(600)
"""


def test_a_killed_process_leaves_nothing_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            held = Path(holder.stdout.readline().strip())
            assert held.parent == tmp_path
            with scratch_directory() as mine:
                assert held.exists(), "that one's process lives"
                assert mine.stat().st_mode & 0o777 == 0o700
        finally:
            holder.kill()
    assert (held / "log").exists()
    with scratch_directory() as mine:
        assert list(tmp_path.iterdir()) == [mine]
    assert not list(tmp_path.iterdir())


def test_a_link_of_that_name_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (temporary / "swarmnode-sandbox-x").symlink_to(precious)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with scratch_directory():
        assert (precious / "file").exists()
