"""What came out: a table, a picture, JSON."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

from bench.chaos.checks import exchanged, growth
from bench.chaos.members import Member
from bench.chaos.plan import WEIGHTS, Fault

mpl.use("Agg")
from matplotlib import pyplot as plt

_COLOURS = {kind: f"C{number}" for number, kind in enumerate(WEIGHTS)}


def figures(member: Member, healed_at: int, half: float, problems: Sequence[str]) -> dict[str, Any]:
    """What is told of one node."""
    row: dict[str, Any] = {
        "node": member.number,
        "rounds": member.done,
        "starts": member.starts,
        "done_again": sum(member.again()),
        "exits": dict(Counter(f"{end.status} {end.why or 'BY ITSELF'}" for end in member.exits)),
        "rounds_after": member.done - healed_at,
        "batches_after": exchanged(member, healed_at),
        "refused": dict(member.progress.rejected),
        "problems": list(problems),
    }
    for role in ("node", "learner"):
        samples = [sample for sample in member.samples if sample.role == role]
        memory = [sample.rss / 2**20 for sample in samples] or [0.0]
        files = [sample.files for sample in samples] or [0]
        grown = growth(samples, half)
        row[f"{role}_mb"] = {"first": memory[0], "last": memory[-1], "max": max(memory), "growth": grown[0]}
        row[f"{role}_files"] = {"first": files[0], "last": files[-1], "max": max(files), "growth": grown[1]}
    return row


def show(rows: Sequence[Mapping[str, Any]], faults: Sequence[Fault], console: Console) -> None:
    """The table, and what is wrong."""
    counts = Counter(fault.kind for fault in faults)
    console.print(f"{len(faults)} faults: {', '.join(f'{count} {kind}' for kind, count in counts.most_common())}")
    table = Table(title="after the last fault: healed, settled, stopped")
    for name in ("node", "rounds", "starts", "done again", "since healing: rounds", "batches", "node MB", "learner MB"):
        table.add_column(name, justify="right")
    for name in ("node files", "learner files", "exits", "refused", "all is well"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            *(str(row[key]) for key in ("node", "rounds", "starts", "done_again", "rounds_after", "batches_after")),
            *(_range(row[key]) for key in ("node_mb", "learner_mb", "node_files", "learner_files")),
            *(_counts(row[key]) for key in ("exits", "refused")),
            "NO" if row["problems"] else "yes",
        )
    sums = [
        str(sum(row[k] for row in rows)) for k in ("rounds", "starts", "done_again", "rounds_after", "batches_after")
    ]
    table.add_section()
    table.add_row("all", *sums)
    console.print(table)
    console.print("of memory and files: first, last, highest, and growth in the second half as the slope says")
    for row in rows:
        for problem in row["problems"]:
            console.print(f"node {row['node']}: {problem}", style="red", markup=False)


def _range(of: Mapping[str, float]) -> str:
    return f"{of['first']:.0f} {of['last']:.0f} {of['max']:.0f} {of['growth']:+.0f}"


def _counts(of: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in of.items())


def write_json(rows: Sequence[Mapping[str, Any]], faults: Sequence[Fault], path: Path) -> None:
    """All figures, and the faults as they were done."""
    content = {"nodes": list(rows), "faults": [asdict(fault) for fault in faults]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def draw(members: Sequence[Member], faults: Sequence[Fault], path: Path) -> None:
    """Rounds over time, a line a node, with its faults on it."""
    figure, axes = plt.subplots(figsize=(9, 4.8), dpi=150, facecolor="white", layout="constrained")
    top = max((member.done for member in members), default=1)
    for member in members:
        times, rounds = zip(*member.rounds, strict=True)
        axes.plot([at / 60 for at in times], rounds, color="#9ca3af", lw=1, zorder=1)
        axes.annotate(
            str(member.number), (times[-1] / 60, rounds[-1]), fontsize=8, xytext=(3, -3), textcoords="offset points"
        )
        for fault in faults:
            if member.number in fault.nodes and fault.kind != "partition":
                hit = [(at / 60, done) for at, done in member.rounds if fault.at <= at <= max(fault.end, fault.at + 1)]
                if hit:
                    axes.plot(
                        *zip(*hit, strict=True), color=_COLOURS[fault.kind], lw=3, solid_capstyle="round", zorder=2
                    )
    for fault in faults:
        if fault.kind == "partition":
            axes.axvspan(fault.at / 60, fault.end / 60, color=_COLOURS["partition"], alpha=0.12, lw=0)
    for kind in dict.fromkeys(fault.kind for fault in faults):
        axes.plot([], [], color=_COLOURS[kind], lw=3, label=kind)
    axes.set_xlabel("minutes", fontsize=11)
    axes.set_ylabel("rounds", fontsize=11)
    axes.set_ylim(0, 1.05 * top)
    axes.set_title(f"{len(members)} nodes, {len(faults)} faults", fontsize=12)
    axes.grid(color="#e5e7eb", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
