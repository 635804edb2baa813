"""`swarmnode compare`: several runs over the rounds they share, as a table and a picture."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from node.config_sources import load_run
from node.datadir import DataDir
from node.errors import NodeError
from node.evaluations import EvaluationRecord, EvaluationsFile
from node.record import MetricsFile, Record
from node.text import clean

RECENT = 50
"""Rounds at the end of the shared ones whose mean reward is told."""

_SMOOTH = 20
"""Rounds that a curve's running mean looks back."""


@dataclass(frozen=True)
class Run:
    """What a data directory says of its run."""

    name: str
    model: str
    records: list[Record]
    evaluations: list[EvaluationRecord]

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Raises NodeError if there is no record of any round in it, or it is damaged."""
        data = DataDir.look(path)
        records = list(MetricsFile(data.metrics_path).read())
        if not records:
            raise NodeError(f"{data.path} has no record of a finished round (metrics.jsonl): nothing to compare")
        model = load_run(data.config_path).config.model.name if data.config_path.is_file() else ""
        return cls(data.path.name, model, records, list(EvaluationsFile(data.evaluations_path).read()))

    def within(self, rounds: tuple[int, int]) -> "Run":
        """The same without what is not of the rounds from the first to the second, both included."""
        first, last = rounds
        return Run(
            self.name,
            self.model,
            [record for record in self.records if first <= record.round <= last],
            [record for record in self.evaluations if first <= record.round <= last],
        )


@dataclass(frozen=True)
class Row:
    """A run in the table. `cumulative` is the sum of `reward_local`, the measure of the SAPO paper; `against` the share
    by which it differs from the first run's, None for that run; `recent` its mean over the last rounds. Of held-out
    tasks those of the last round at which all runs were measured: `error` is not known from the record.
    """

    run: str
    model: str
    rounds: int
    cumulative: float
    against: float | None
    recent: float
    evaluated: int | None
    greedy: float | None
    sampled: float | None
    pass_k: float | None


def compare_runs(directories: Sequence[Path], png: Path, as_json: bool) -> None:
    """Print the table, and draw the curves into `png`. Without matplotlib it says so and draws nothing.

    Raises NodeError if a directory has no run, or the runs share no round; OSError.
    """
    if len(directories) < 2:
        raise NodeError("give two data directories at least: the others are held against the first")
    runs = _told_apart([Run.read(path) for path in directories])
    first, last = max(run.records[0].round for run in runs), min(run.records[-1].round for run in runs)
    if first > last:
        raise NodeError("these runs share no round: their records begin after others end")
    runs = [run.within((first, last)) for run in runs]
    rows = rows_of(runs)
    if as_json:
        print(json.dumps({"first_round": first, "last_round": last, "runs": [asdict(row) for row in rows]}, indent=2))
    else:
        print("\n".join(_lines(rows, first, last)))
    if len({str(run.evaluations[-1].asked) for run in runs if run.evaluations}) > 1:
        print("warning: not all runs were measured on the same held-out tasks ([tasks] mix)", file=sys.stderr)
    _draw(runs, png)


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """The table of runs that are cut to the rounds they share."""
    common = set.intersection(*({record.round for record in run.evaluations} for run in runs))
    at = max(common, default=None)
    base = sum(record.reward_local for record in runs[0].records)
    rows = []
    for run in runs:
        rewards = [record.reward_local for record in run.records]
        found = next((record for record in run.evaluations if record.round == at), None)
        rows.append(
            Row(
                run=run.name,
                model=run.model,
                rounds=len(rewards),
                cumulative=sum(rewards),
                against=None if run is runs[0] or base == 0 else sum(rewards) / base - 1,
                recent=sum(rewards[-RECENT:]) / len(rewards[-RECENT:]),
                evaluated=at,
                greedy=found.greedy if found else None,
                sampled=found.sampled if found else None,
                pass_k=found.pass_k if found else None,
            )
        )
    return rows


def _told_apart(runs: list[Run]) -> list[Run]:
    """Runs whose directories have one name get numbers."""
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else Run(f"{run.name} ({place})", run.model, run.records, run.evaluations)
        for place, run in enumerate(runs, 1)
    ]


def _lines(rows: Sequence[Row], first: int, last: int) -> list[str]:
    head = ["run", "model", "rounds", "cumulative reward", "against the first", f"last {RECENT}"]
    head += ["greedy", "sampled", "pass@k"]
    cells = [head]
    for row in rows:
        against = "" if row.against is None else f"{row.against:+.1%}"
        held_out = ["" if value is None else f"{value:.3f}" for value in (row.greedy, row.sampled, row.pass_k)]
        totals = [str(row.rounds), f"{row.cumulative:.2f}", against, f"{row.recent:.3f}"]
        cells.append([clean(row.run), clean(row.model), *totals, *held_out])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    at = rows[0].evaluated
    measured = f"held-out accuracy after round {at}" if at is not None else "no round at which all were evaluated"
    return [f"rounds {first} to {last}; {measured}", "", lines[0], "-" * len(lines[0]), *lines[1:]]


def _draw(runs: Sequence[Run], path: Path) -> None:
    try:
        import matplotlib as mpl

        mpl.use("agg")
        from matplotlib import pyplot
    except ImportError:
        print(
            "no picture: matplotlib is not installed; `pip install 'swarmnode[bench]'`, in a clone"
            " `.venv/bin/pip install -e '.[bench]'`",
            file=sys.stderr,
        )
        return
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for run in runs:
        rounds = [record.round for record in run.records]
        axes[0].plot(rounds, _running_mean([record.reward_local for record in run.records]), label=run.name)
        measured = [record.round for record in run.evaluations]
        axes[1].plot(measured, [record.sampled for record in run.evaluations], marker="o", label=run.name)
    _label(axes[0], f"mean reward of own rollouts (of the last {_SMOOTH} rounds)")
    _label(axes[1], "held-out accuracy, sampled")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise NodeError(f"{path} cannot be drawn: {error}") from error
    finally:
        pyplot.close(figure)
    print(f"{path} drawn", file=sys.stderr)


def _label(axes: Any, what: str) -> None:
    axes.set_xlabel("round")
    axes.set_ylabel(what)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _running_mean(values: Sequence[float]) -> list[float]:
    means = []
    for end in range(1, len(values) + 1):
        some = values[max(0, end - _SMOOTH) : end]
        means.append(sum(some) / len(some))
    return means
