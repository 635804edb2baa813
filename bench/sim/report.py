"""Tables and plots of the simulation."""

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.sim.jobs import Job, Outcome
from bench.sim.sections import Section

Outcomes = Mapping[Job, Outcome]

COLUMNS = (
    *("configuration", "lr", "cumulative", "ratio", "above", "final", "held out", "solved", "worst node", "groups"),
    *("informative", "external", "tokens", "entropy", "refused", "seconds"),
)


def figures(section: Section, outcomes: Outcomes) -> list[dict[str, Any]]:
    """A row's means over its seeds, for every row of a table.

    `ratio` is the cumulative reward over that of the control's runs with the same seeds, `above` in how many of the
    runs it is above that.
    """
    control = section.rows[section.control]
    of_seed = {(job.pretrained, job.plan.seed): outcomes[job].cumulative for job in control}
    return [_row(name, jobs, outcomes, of_seed) for name, jobs in section.rows.items()]


def _row(
    name: str, jobs: Sequence[Job], outcomes: Outcomes, of_seed: Mapping[tuple[int, int], float]
) -> dict[str, Any]:
    found = [outcomes[job] for job in jobs]
    cumulative = [outcome.cumulative for outcome in found]
    pairs = [
        (outcomes[job].cumulative, of_seed[job.pretrained, job.plan.seed])
        for job in jobs
        if (job.pretrained, job.plan.seed) in of_seed
    ]
    held_out = [outcome.last_held_out for outcome in found if outcome.last_held_out is not None]
    judged = sum(outcome.judged for outcome in found)
    mean = statistics.fmean(cumulative)
    return {
        "configuration": name,
        "lr": jobs[0].plan.lr,
        "cumulative": mean,
        "deviation": statistics.stdev(cumulative) if len(cumulative) > 1 else math.nan,
        "ratio": sum(one for one, _ in pairs) / sum(other for _, other in pairs) if pairs else math.nan,
        "above": sum(one > other for one, other in pairs),
        "pairs": len(pairs),
        "final": statistics.fmean(outcome.final for outcome in found),
        "held out": statistics.fmean(each.accuracy for each in held_out) if held_out else math.nan,
        "solved": statistics.fmean(each.solved for each in held_out) if held_out else math.nan,
        "worst node": statistics.fmean(outcome.worst for outcome in found),
        "groups": statistics.fmean(outcome.generated for outcome in found),
        "informative": statistics.fmean(outcome.informative for outcome in found),
        "external": statistics.fmean(outcome.external for outcome in found),
        "tokens": statistics.fmean(outcome.tokens for outcome in found),
        "entropy": statistics.fmean(statistics.fmean(outcome.entropy[-10:]) for outcome in found),
        "refused": sum(outcome.refused for outcome in found) / judged if judged else 0.0,
        "seconds": statistics.fmean(outcome.seconds for outcome in found),
        "runs": len(found),
    }


def table(section: Section, outcomes: Outcomes) -> Table:
    """The table as it is printed."""
    rows = figures(section, outcomes)
    result = Table(title=section.title, title_justify="left")
    for name in COLUMNS:
        result.add_column(name, justify="left" if name == "configuration" else "right")
    for row in rows:
        result.add_row(*_shown(row))
    return result


def _shown(row: Mapping[str, Any]) -> list[str]:
    spread = "" if math.isnan(row["deviation"]) else f" ± {row['deviation']:.2f}"
    return [
        row["configuration"],
        f"{row['lr']:.0e}",
        f"{row['cumulative']:.2f}{spread}",
        f"{100 * (row['ratio'] - 1):+.0f} %",
        f"{row['above']} of {row['pairs']}",
        f"{row['final']:.3f}",
        "" if math.isnan(row["held out"]) else f"{row['held out']:.3f}",
        "" if math.isnan(row["solved"]) else f"{row['solved']:.3f}",
        f"{row['worst node']:.2f}",
        f"{row['groups']:.0f}",
        f"{row['informative']:.1f}",
        f"{row['external']:.1f}",
        f"{row['tokens']:.0f}",
        f"{row['entropy']:.3f}",
        f"{100 * row['refused']:.1f} %",
        f"{row['seconds']:.0f}",
    ]


def write_csv(sections: Sequence[Section], outcomes: Outcomes, path: Path) -> None:
    """All tables in one file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer: csv.DictWriter[str] | None = None
        for section in sections:
            for row in figures(section, outcomes):
                full = {"table": section.title, **row}
                if writer is None:
                    writer = csv.DictWriter(file, list(full))
                    writer.writeheader()
                writer.writerow(full)


def draw(section: Section, outcomes: Outcomes, path: Path, window: int = 10) -> None:
    """Reward against rounds: the mean over runs, a band of one standard deviation, moving average over `window`.

    Raises ImportError without matplotlib.
    """
    from matplotlib import pyplot as plt

    from bench.learning import moving_average

    figure, axes = plt.subplots(figsize=(7.5, 4.2))
    for name in section.curves:
        found = [outcomes[job] for job in section.rows[name]]
        total = statistics.fmean(outcome.cumulative for outcome in found)
        curves = [moving_average(outcome.reward, window) for outcome in found]
        mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        spread = [statistics.pstdev(values) for values in zip(*curves, strict=True)]
        rounds = range(1, len(mean) + 1)
        [line] = axes.plot(rounds, mean, label=f"{name} ({total:.1f})", linewidth=1.8)
        low = [m - s for m, s in zip(mean, spread, strict=True)]
        high = [m + s for m, s in zip(mean, spread, strict=True)]
        axes.fill_between(rounds, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel("round")
    axes.set_ylabel("reward of a node's own rollouts")
    axes.set_title(section.title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(title="own / others' groups (cumulative)")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
