"""The benchmarks of whole nodes run, and measure what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.rounds import PARTS, shares
from tests.node.records import record

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


@pytest.mark.slow
def test_the_time_of_a_round_is_told_apart(tmp_path: Path) -> None:
    found, table = smoke("rounds", tmp_path / "rounds.json", "--set", "training.overlap=true")
    ((name, shares_of),) = found.items()
    assert f"| {name} | " in table
    parts = shares_of["parts"]
    assert parts["generate"] > parts["waited"] > 0, "part of the sampling goes by while the round before is scored"
    whole = sum(parts[part] for part in [*PARTS, "waited"] if part != "generate") + shares_of["between"]
    assert whole == pytest.approx(shares_of["wall"])


def test_a_round_lasts_until_the_next_is_scored_and_what_was_warmed_up_does_not_count() -> None:
    records = [record(n, seconds_generate=float(n), seconds_update=4.0) for n in (1, 2, 3)]
    told = [("draw", 0.0), ("generate", 1.0)]
    for begun in (3.0, 13.0, 23.0):
        told += [("score", begun), ("share", begun + 1), ("mix", begun + 1.5), ("update", begun + 2)]
        told += [("checkpoint", begun + 7), ("generate", begun + 8)]
    ((second, seconds),) = shares(records, told, 1)
    assert second.round == 2
    assert seconds["wall"] == 10
    assert {part: seconds[part] for part in ("score", "share", "mix", "waited")} == {
        "score": 1,
        "share": 0.5,
        "mix": 0.5,
        "waited": 2,
    }
    assert (seconds["generate"], seconds["update"]) == (3, 4), "as recorded: what follows the update is not of it"
