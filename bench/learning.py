"""Does a node that trains alone learn? `python -m bench.learning [--seeds 3] [--rounds 300]`.

For each seed the real command is run, `swarmnode start --silo --model tiny`, then `swarmnode eval`. Printed are the
mean of `reward_local` over the first and the last fifty rounds, and the held-out accuracy of base and policy for each
task; drawn is the reward over the rounds. Two CPU cores need about half a minute a seed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

mpl.use("Agg")
from matplotlib import pyplot as plt

SPAN = 50
"""Rounds at either end that are compared."""
WINDOW = 20
"""Rounds in the moving average of the plot."""


@dataclass(frozen=True)
class Run:
    """One seed. `held_out` maps a task, or `all`, to the sampled accuracy of base and policy; shares from 0 to 1."""

    seed: int
    rewards: list[float]
    seconds: float
    held_out: dict[str, tuple[float, float]]

    @property
    def first(self) -> float:
        """Mean reward of the first rounds."""
        return statistics.fmean(self.rewards[:SPAN])

    @property
    def last(self) -> float:
        """Mean reward of the last rounds."""
        return statistics.fmean(self.rewards[-SPAN:])


def train_and_evaluate(seed: int, rounds: int, directory: Path) -> Run:
    """Run one node. Raises CalledProcessError if it, or its evaluation, fails."""
    command = [sys.executable, "-m", "node.cli"]
    where = ["--data-dir", str(directory)]
    begun = time.monotonic()
    start = ["start", "--silo", "--no-tty", "--model", "tiny", "--rounds", str(rounds), "--seed", str(seed)]
    subprocess.run([*command, *start, *where], check=True, stdout=sys.stderr)
    seconds = time.monotonic() - begun
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [float(json.loads(line)["reward_local"]) for line in lines]
    if len(rewards) != rounds:
        raise ValueError(f"{directory / 'metrics.jsonl'} has {len(rewards)} rounds, {rounds} were asked for")
    answer = subprocess.run([*command, "eval", "--json", *where], check=True, stdout=subprocess.PIPE).stdout
    return Run(seed, rewards, seconds, _held_out(json.loads(answer)))


def _held_out(evaluation: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    scores = [*evaluation["kinds"], {**evaluation["overall"], "kind": "all"}]
    return {s["kind"]: (s["base"]["sampled"]["mean"], s["policy"]["sampled"]["mean"]) for s in scores}


def show(runs: Sequence[Run], console: Console) -> None:
    """Print a table of the rewards and one of the held-out accuracy, means over seeds with their range."""
    rewards = Table(title=f"reward_local, mean of {SPAN} rounds")
    for name in ("seed", "first", "last", "ratio", "held-out base", "held-out policy", "seconds"):
        rewards.add_column(name, justify="right")
    for run in runs:
        base, policy = run.held_out["all"]
        figures = [f"{value:.3f}" for value in (run.first, run.last)]
        rewards.add_row(
            str(run.seed), *figures, f"{run.last / run.first:.1f}", f"{base:.3f}", f"{policy:.3f}", f"{run.seconds:.0f}"
        )
    console.print(rewards)
    tasks = Table(title="held-out accuracy, sampled as in training (mean over seeds, range of the policy's)")
    for name in ("task", "base", "policy", "range"):
        tasks.add_column(name, justify="left" if name == "task" else "right")
    for kind in runs[0].held_out:
        bases = [run.held_out[kind][0] for run in runs]
        policies = [run.held_out[kind][1] for run in runs]
        spread = f"{min(policies):.2f} to {max(policies):.2f}"
        if kind == "all":
            tasks.add_section()
        tasks.add_row(kind, f"{statistics.fmean(bases):.3f}", f"{statistics.fmean(policies):.3f}", spread)
    console.print(tasks)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window` - 1 before it."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def finish(figure: Any, axes: Any, path: Path) -> None:
    """Give a plot of rewards its grid and legend, and write it."""
    axes.set_ylim(0, None)
    axes.grid(color="#e5e7eb", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=10, loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the reward over the rounds: mean over seeds, and a band from the lowest to the highest seed."""
    curves = [moving_average(run.rewards, WINDOW) for run in runs]
    rounds = range(1, len(curves[0]) + 1)
    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=150, facecolor="white", layout="constrained")
    lowest, highest = ([pick(at) for at in zip(*curves, strict=True)] for pick in (min, max))
    axes.fill_between(rounds, lowest, highest, color="#2563eb", alpha=0.18, linewidth=0, label="range over seeds")
    axes.plot(rounds, [statistics.fmean(at) for at in zip(*curves, strict=True)], color="#1d4ed8", lw=2, label="mean")
    base, policy = (statistics.fmean(run.held_out["all"][which] for run in runs) for which in (0, 1))
    axes.axhline(base, color="#6b7280", ls=":", lw=1.2, label=f"held-out accuracy before ({base:.2f})")
    axes.axhline(policy, color="#047857", ls="--", lw=1.2, label=f"held-out accuracy after ({policy:.2f})")
    axes.set_xlabel("round (8 tasks x 8 completions)", fontsize=11)
    axes.set_ylabel(f"reward of its own rollouts\n(moving average of {WINDOW} rounds)", fontsize=11)
    seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} seeds"
    axes.set_title(f"A node training alone: tiny model, nine ReasoningGYM tasks, {seeds}", fontsize=12)
    axes.set_xlim(1, len(curves[0]))
    finish(figure, axes, path)


def main() -> None:
    """Run every seed, then print, draw and record."""
    parser = argparse.ArgumentParser(description="Train the tiny model alone, from several seeds.")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs; their seeds are 1, 2, 3 ...")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the curve to this PNG file, such as docs/img/learning.png")
    parser.add_argument("--keep", type=Path, help="directory for the runs' data; default: a temporary one")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.rounds < 2 * SPAN:
        parser.error(f"needs at least one seed and {2 * SPAN} rounds")
    with tempfile.TemporaryDirectory(prefix="swarmnode-learning-") as temporary:
        root: Path = arguments.keep or Path(temporary)
        seeds = range(1, arguments.seeds + 1)
        runs = [train_and_evaluate(seed, arguments.rounds, root / f"seed-{seed}") for seed in seeds]
    show(runs, Console())
    if arguments.plot:
        draw(runs, arguments.plot)
    if arguments.json:
        record = [asdict(run) | {"first": run.first, "last": run.last} for run in runs]
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
