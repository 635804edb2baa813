"""What came out of runs of real nodes, side by side: a table, a plot, JSON, and the order beside a simulation's."""

import argparse
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

from bench.learning import finish, moving_average
from bench.runs import Run, RunError, Summary, summarise

mpl.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ("#6b7280", "#1d4ed8", "#047857", "#b45309", "#7c3aed", "#be123c")

Scores = Mapping[str, Sequence[float]]
"""Cumulative reward of a configuration, a seed."""

HeldOut = Mapping[tuple[str, int], Sequence[tuple[float, float]]]
"""Accuracy of base model and policy of each node, by configuration and seed."""


def compare_runs(runs: Sequence[Run]) -> list[Summary]:
    """Summaries over the rounds that all of them have done; none if that is no round."""
    rounds = min((run.rounds for run in runs), default=0)
    return [summarise(run, rounds) for run in runs] if rounds > 0 else []


def by_configuration(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """In the order in which they come."""
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary.configuration, []).append(summary)
    return groups


def cumulative(summaries: Sequence[Summary]) -> dict[str, list[float]]:
    """Cumulative reward of each configuration, a seed."""
    return {name: [each.cumulative for each in group] for name, group in by_configuration(summaries).items()}


def show(title: str, summaries: Sequence[Summary], held_out: HeldOut, console: Console) -> None:
    """Print the table, means over seeds, and what its columns are."""
    groups = by_configuration(summaries)
    alone = next((name for name in groups if name.endswith("/0")), None)
    table = Table(title=f"{title}, {summaries[0].rounds} rounds")
    table.add_column("configuration")
    for name in (f"of {alone or 'alone'}", "cumulative", "final", "worst node", "informative", "generated", "external"):
        table.add_column(name, justify="right")
    for name in ("tokens trained", "refused", "gate", "lag", "seconds", *(("held-out",) if held_out else ())):
        table.add_column(name, justify="right")
    for name, group in groups.items():
        table.add_row(name, _ratio(group, groups.get(alone or "", [])), *_cells(group), *_held_out(group, held_out))
    console.print(table)
    console.print(
        "cumulative: sum over rounds of the mean reward of the nodes' own rollouts; final: mean of the last tenth;"
        " worst node: its cumulative reward.\ninformative: groups of an update whose rewards differ; generated,"
        " external: groups of all nodes; refused: rewarded completions of others that the likelihood gate refused;"
        " gate: its threshold in the end, in nats a token;\n"
        "lag: rounds that the slowest node was behind when the first was done.",
        style="dim",
    )


def _cells(group: Sequence[Summary]) -> list[str]:
    totals = [(s.generated_groups, s.external_groups, s.tokens_trained, s.refused) for s in group]
    thresholds = [s.threshold for s in group if s.threshold is not None]
    counts = [f"{statistics.fmean(values):,.0f}" for values in zip(*totals, strict=True)]
    return [
        _spread([s.cumulative for s in group], 2),
        _spread([s.final for s in group], 3),
        _spread([s.worst for s in group], 2),
        f"{statistics.fmean(s.informative for s in group):.1f}",
        *counts,
        f"{statistics.fmean(thresholds):.1f}" if thresholds else "-",
        f"{statistics.fmean(s.lag for s in group):.0f}",
        f"{statistics.fmean(s.seconds for s in group):.0f}",
    ]


def _spread(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _ratio(group: Sequence[Summary], alone: Sequence[Summary]) -> str:
    """Change against training alone, from the same seeds."""
    base = {summary.seed: summary.cumulative for summary in alone}
    ratios = [summary.cumulative / base[summary.seed] for summary in group if base.get(summary.seed, 0.0) > 0]
    return f"{statistics.fmean(ratios) - 1:+.0%}" if ratios else "-"


def _held_out(group: Sequence[Summary], held_out: HeldOut) -> list[str]:
    if not held_out:
        return []
    pairs = [pair for s in group for pair in held_out.get((s.configuration, s.seed), ())]
    if not pairs:
        return ["-"]
    base, policy = (statistics.fmean(values) for values in zip(*pairs, strict=True))
    return [f"{base:.3f} to {policy:.3f}"]


def order(scores: Scores) -> list[str]:
    """Configurations by their mean over seeds, the lowest first."""
    return sorted(scores, key=lambda name: statistics.fmean(scores[name]))


def read_scores(path: Path) -> dict[str, list[float]]:
    """A simulation's figures: `{configuration: [cumulative reward a seed]}`. Raises RunError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        scores = {str(name): [float(value) for value in values] for name, values in content.items()}
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{path} does not hold {{configuration: [cumulative reward a seed]}}") from error
    if not all(scores.values()):
        raise RunError(f"{path} has a configuration without any seed")
    return scores


def agreement(ours: Scores, theirs: Scores) -> tuple[bool, str]:
    """Whether both put the configurations that they share in the same order, and that in words.

    Raises RunError if they share fewer than two.
    """
    shared = [name for name in ours if name in theirs]
    if len(shared) < 2:
        raise RunError(f"nothing to compare: {', '.join(ours)} here, {', '.join(theirs)} in the simulation")
    ranks = [order({name: scores[name] for name in shared}) for scores in (ours, theirs)]
    here, there = (" < ".join(names) for names in ranks)
    if here == there:
        return True, f"the order agrees with the simulation: {here}"
    pairs = list(itertools.combinations(shared, 2))
    places = [{name: place for place, name in enumerate(names)} for names in ranks]
    alike = sum(len({place[a] < place[b] for place in places}) == 1 for a, b in pairs)
    return False, f"the order differs: {here} here, {there} in the simulation ({alike} of {len(pairs)} pairs agree)"


def draw(title: str, summaries: Sequence[Summary], path: Path) -> None:
    """Draw the reward over the rounds, mean over nodes and seeds; the band spans the seeds."""
    rounds = summaries[0].rounds
    window = min(rounds, max(5, rounds // 20))
    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=150, facecolor="white", layout="constrained")
    for (name, group), colour in zip(by_configuration(summaries).items(), itertools.cycle(COLOURS), strict=False):
        curves = list(zip(*(moving_average(summary.curve, window) for summary in group), strict=True))
        across = range(1, rounds + 1)
        if len(group) > 1:
            lowest, highest = [min(at) for at in curves], [max(at) for at in curves]
            axes.fill_between(across, lowest, highest, color=colour, alpha=0.15, linewidth=0)
        axes.plot(across, [statistics.fmean(at) for at in curves], color=colour, lw=2, label=name)
    axes.set_xlabel("round", fontsize=11)
    axes.set_ylabel(f"reward of own rollouts\n(moving average of {window} rounds)", fontsize=11)
    axes.set_title(title, fontsize=12)
    finish(figure, axes, path)


def add_arguments(parser: argparse.ArgumentParser, nodes: int, rounds: int, rate: str) -> None:
    """What every comparison of configurations can be told. `rate` says which learning rate is the default."""
    whole = ["8/0", "4/4", "default"]
    parser.add_argument("--nodes", type=int, default=nodes)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--configurations", nargs="+", default=whole, metavar="NAME", help="I/J, default, a strategy")
    parser.add_argument("--lr", nargs="+", default=[], metavar="[NAME=]RATE", help=f"default {rate}")
    parser.add_argument("--eval", action="store_true", help="also measure held-out accuracy before and after")
    parser.add_argument("--per-task", type=int, default=16, help="held-out tasks of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="default: reward.png in --out")


def write_json(summaries: Sequence[Summary], held_out: HeldOut, path: Path) -> None:
    """`cumulative`, in the form of `read_scores`, and `runs` with all figures."""
    runs: list[dict[str, Any]] = []
    for summary in summaries:
        pairs = held_out.get((summary.configuration, summary.seed))
        more = {"held_out": [{"base": base, "policy": policy} for base, policy in pairs]} if pairs else {}
        runs.append({**asdict(summary), **more})
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"cumulative": cumulative(summaries), "runs": runs}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
