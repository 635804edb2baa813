"""Several runs side by side, over the rounds they share."""

import json
import sys
from pathlib import Path

import pytest

from node.commands.comparing import compare_runs
from node.datadir import DataDir
from node.errors import NodeError
from node.evaluations import EvaluationsFile
from node.record import MetricsFile
from tests.node.records import evaluated, record


def run(path: Path, rounds: range, reward: float, **sampled: float) -> Path:
    with DataDir.open(path) as data:
        metrics, evaluations = MetricsFile(data.metrics_path), EvaluationsFile(data.evaluations_path)
        for number in rounds:
            metrics.append(record(number, reward_local=reward))
        for name, value in sampled.items():
            evaluations.append(evaluated(int(name[1:]), value, gcd=8))
    return path


def test_runs_are_compared_over_the_rounds_they_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    silo = run(tmp_path / "silo", range(1, 41), 0.2, r10=0.1, r20=0.3, r40=0.9)
    swarm = run(tmp_path / "swarm", range(1, 31), 0.5, r10=0.2, r20=0.6, r30=0.7)
    compare_runs([silo, swarm], tmp_path / "out.png", as_json=True)
    told = json.loads(capsys.readouterr().out)
    first, second = told["runs"]
    assert (told["first_round"], told["last_round"]) == (1, 30)
    assert (first["rounds"], first["cumulative"], first["against"]) == (30, pytest.approx(6.0), None)
    assert (second["cumulative"], second["against"]) == (pytest.approx(15.0), pytest.approx(1.5))
    assert [(row["evaluated"], row["sampled"]) for row in told["runs"]] == [(20, 0.3), (20, 0.6)]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    compare_runs([silo, swarm], tmp_path / "out.png", as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rounds 1 to 30; held-out accuracy after round 20"
    assert lines[-1].split() == ["swarm", "30", "15.00", "+150.0%", "0.500", "0.000", "0.600", "0.000"]


def test_without_matplotlib_there_is_a_table_and_a_word_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    runs = [run(tmp_path / place / "node", range(1, 3), 0.5) for place in ("a", "b")]
    compare_runs(runs, tmp_path / "out.png", as_json=False)
    out, err = capsys.readouterr()
    assert "node (1)" in out
    assert "node (2)" in out
    assert "no round at which all were evaluated" in out
    assert "matplotlib is not installed; `pip install 'swarmnode[bench]'`" in err
    assert not (tmp_path / "out.png").exists()


def test_runs_without_anything_in_common_are_an_error(tmp_path: Path) -> None:
    early, late = run(tmp_path / "early", range(1, 3), 0.5), run(tmp_path / "late", range(5, 7), 0.5)
    empty = run(tmp_path / "empty", range(0), 0.5)
    for runs, problem in (
        ([early, late], "share no round"),
        ([early], "two data directories at least"),
        ([early, empty], "has no record of a finished round"),
        ([early, tmp_path / "typo"], "no node has run"),
    ):
        with pytest.raises(NodeError, match=problem):
            compare_runs(runs, tmp_path / "out.png", as_json=False)
