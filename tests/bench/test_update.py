"""The bench of the learning step, on a small cell of the tiny model."""

import json
import sys
from pathlib import Path

import pytest

from bench import update


@pytest.mark.slow
def test_the_bench_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    json_file, plot = tmp_path / "figures.json", tmp_path / "figures.png"
    monkeypatch.setattr(sys, "argv", ["update", "--smoke", "--json", str(json_file), "--plot", str(plot)])
    update.main()
    [(cell, figures)] = json.loads(json_file.read_text("utf-8")).items()
    assert cell == "P20C8"
    assert figures["tokens_per_second"] * figures["seconds"] == pytest.approx(update.GROUPS * 8 * 8)
    assert figures["peak_gb"] > 0
    assert plot.stat().st_size > 0


@pytest.mark.parametrize("name", ["P50", "50C32", "P50C32L", "p50c32"])
def test_a_cell_that_is_none_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["update", "--cells", name])
    with pytest.raises(SystemExit):
        update.main()
    assert f"{name} is no cell" in capsys.readouterr().err


def test_the_least_arithmetic_counts_each_prompt_once() -> None:
    model = update._Model(hidden=1, inner=1, vocabulary=0, layers=0, heads=1, width=1, weights=1)
    one, eight = (model.operations(update.Shape(100, 11, samples), groups=1) for samples in (1, 8))
    assert one == 4 * (100 + 10)
    assert eight == 4 * (100 + 8 * 10)
