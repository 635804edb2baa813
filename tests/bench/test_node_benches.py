"""The benchmarks of whole nodes run, and measure what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def smoke(name: str, path: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The figures of a benchmark, and its table."""
    command = [sys.executable, "-m", f"bench.{name}", "--smoke", "--json", str(path), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    return json.loads(path.read_text()), done.stdout


@pytest.mark.slow
def test_waiting_for_a_node_is_measured(tmp_path: Path) -> None:
    times, table = smoke("startup", tmp_path / "times.json")
    assert {name for name in times if f"| {name} | " in table} == {
        "help",
        "status",
        "status of a running node",
        "first round, transformers",
    }
    # A node's first round takes a learner, with torch; the others need neither.
    assert 0 < times["help"]["seconds"][0] < times["first round, transformers"]["seconds"][0]
