"""Tables in Markdown, and the plot."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.scaling.costs import Costs
from bench.scaling.plan import Outcome, Plan
from bench.scaling.real import Seen
from bench.scaling.use import Use

Rows = Mapping[str, Mapping[int, tuple[Plan, Outcome]]]
"""By what is different about a swarm, and its size."""

BASE, CHURN, RIDERS, ONE, BLIND = "by the rule", "30 % churn", "20 % riders", "one topic", "not looking for shards"

_FULL = 0.05
"""Share of nodes with a full link from which on times mean nothing: queues grow as long as it lasts."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def cost_table(costs: Costs) -> str:
    """What a batch costs."""
    rows = [
        ("sign, compress, seal", f"{1e3 * costs.sign:.2f} ms a batch"),
        ("check before passing on", f"{1e3 * costs.check:.2f} ms a batch"),
        ("make the task anew", f"{1e3 * costs.make:.2f} ms a group"),
        ("score", f"{1e3 * costs.score:.2f} ms a group"),
        ("store", f"{1e3 * costs.store:.2f} ms a batch"),
        ("completions as text", f"{costs.text} bytes a batch"),
        ("envelope", f"{costs.envelope} bytes"),
        ("gossip frame", f"{costs.message} bytes"),
    ]
    return markdown(("", "measured"), rows)


def check_table(seen: Sequence[Seen]) -> str:
    """Real nodes, and two simulations of their meshes."""
    real = seen[0]
    rows = [
        [name, *(f"{getattr(one, field) * scale:,.{digits}f}" for one in seen)]
        for name, field, scale, digits in (
            ("delivered, %", "delivered", 100, 2),
            ("copies of a batch that come to a node", "copies", 1, 2),
            ("bytes into a node, kB/s", "bytes_in", 1e-3, 1),
            ("bytes out of a node, kB/s", "bytes_out", 1e-3, 1),
            ("half of the nodes have it, ms", "half", 1e3, 0),
            ("the last has it, ms", "last", 1e3, 0),
            ("processor time a copy, ms", "cpu", 1e3, 2),
        )
    ]
    return markdown((f"{real.nodes} nodes, {real.batches} batches", "real", "simulated", "simulated, one core"), rows)


def main_table(rows: Rows) -> str:
    """All swarms."""
    head = (
        "nodes",
        "",
        "shards",
        "in, kB/s",
        "p99",
        "out, kB/s",
        "p99",
        "copies",
        "delivered",
        "worst 1 %",
        "of the swarm",
    )
    return markdown(
        (*head, "half, s", "p99", "in the pool, s"),
        [_row(name, plan, outcome) for name, sizes in rows.items() for plan, outcome in sizes.values()],
    )


def _row(name: str, plan: Plan, seen: Outcome) -> list[str]:
    full = seen.full > _FULL
    times = [seen.half.mean, seen.half.p99, seen.pooled]
    return [
        f"{plan.nodes:,}",
        name,
        f"{plan.subscribe} of {plan.shards}",
        *(f"{value / 1e3:,.0f}" for value in (seen.bytes_in.mean, seen.bytes_in.p99)),
        *(f"{value / 1e3:,.0f}" for value in (seen.bytes_out.mean, seen.bytes_out.p99)),
        f"{seen.copies:.1f}",
        "link full" if full else f"{100 * seen.delivered:.2f} %",
        "" if full else f"{100 * seen.worst:.1f} %",
        "" if full else f"{100 * seen.swarm_seen:,.3g} %",
        *("" if full else "never" if math.isinf(value) else f"{value:.2f}" for value in times),
    ]


def detail_table(rows: Rows) -> str:
    """What the bytes are made of."""
    head = (
        "nodes",
        "",
        "batches/s heard",
        "connections",
        "p99",
        "mesh",
        "control, kB/s",
        "catch-up, kB/s",
        "uplink in use",
    )
    return markdown(
        (*head, "batches followed", "seconds"),
        [
            [
                f"{plan.nodes:,}",
                name,
                f"{seen.batches:.2f}",
                f"{seen.connections.mean:.1f}",
                f"{seen.connections.p99:.0f}",
                f"{seen.mesh:.1f}",
                f"{seen.control / 1e3:.1f}",
                f"{seen.catch_up / 1e3:.1f}",
                f"{100 * seen.load:.1f} %",
                f"{seen.followed}",
                f"{seen.seconds:.0f}",
            ]
            for name, sizes in rows.items()
            for plan, seen in sizes.values()
        ],
    )


def sweep_table(found: Rows) -> str:
    """How many nodes a shard takes."""
    base, churn = found[BASE], found[CHURN]
    return markdown(
        (
            "nodes a shard",
            "shards",
            "in, kB/s",
            "delivered",
            "worst 1 %",
            "half, s",
            f"delivered, {CHURN}",
            "worst 1 %",
        ),
        [
            [
                f"{each}",
                f"{plan.subscribe} of {plan.shards}",
                f"{seen.bytes_in.mean / 1e3:,.0f}",
                f"{100 * seen.delivered:.2f} %",
                f"{100 * seen.worst:.1f} %",
                f"{seen.half.mean:.2f}",
                f"{100 * churn[each][1].delivered:.2f} %",
                f"{100 * churn[each][1].worst:.1f} %",
            ]
            for each, (plan, seen) in base.items()
        ],
    )


def use_table(uses: Sequence[Use]) -> str:
    """What a node makes of what it hears."""
    head = ("nodes heard", "groups/s", "admitted", "one core busy", "to the pool, ms", "p99, ms", "candidates")
    return markdown(
        (*head, "trained a round", "ever trained on"),
        [
            [
                f"{one.heard}",
                f"{one.offered:.2f}",
                f"{100 * one.admitted:.1f} %",
                f"{100 * one.busy:.2f} %",
                f"{1e3 * one.wait:.1f}",
                f"{1e3 * one.wait_p99:.1f}",
                f"{one.candidates:.0f}",
                f"{one.trained:.1f}",
                f"{100 * one.used:.1f} %",
            ]
            for one in uses
        ],
    )


def flatness(rows: Rows) -> float | None:
    """Bytes in and out of a node in the largest swarm over those with 1,000 nodes, the larger of the two ratios."""
    sizes = rows[BASE]
    if 1000 not in sizes or max(sizes) == 1000:
        return None
    small, large = sizes[1000][1], sizes[max(sizes)][1]
    return max(large.bytes_in.mean / small.bytes_in.mean, large.bytes_out.mean / small.bytes_out.mean)


def draw(rows: Rows, path: Path) -> None:
    """Bytes of a node, and time to half of the subscribers, against the size. Raises ImportError without matplotlib."""
    from matplotlib import pyplot as plt

    colours = {BASE: "#1d4ed8", CHURN: "#d97706", RIDERS: "#047857", ONE: "#6b7280", BLIND: "#dc2626"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), dpi=150, facecolor="white", layout="constrained")
    for name, sizes in rows.items():
        seen = [(plan.nodes, outcome) for plan, outcome in sizes.values()]
        style = {"color": colours[name], "marker": "o", "ms": 4, "lw": 2 if name == BASE else 1.3, "label": name}
        left.plot([nodes for nodes, _ in seen], [one.bytes_in.mean / 1e3 for _, one in seen], **style)
        timed = [(nodes, one.half.mean) for nodes, one in seen if one.full <= _FULL and math.isfinite(one.half.mean)]
        right.plot([nodes for nodes, _ in timed], [half for _, half in timed], **style)
    left.axhline(2500, color="#9ca3af", ls=":", lw=1.2)
    left.text(1e5, 2300, "uplink of a home, 20 Mbit/s", fontsize=9, color="#6b7280", va="top", ha="right")
    left.set_yscale("log")
    left.set_ylabel("kB a second into a node", fontsize=11)
    right.set_ylim(0, None)
    right.set_ylabel("seconds until half of\nthe subscribers have a batch", fontsize=11)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("nodes", fontsize=11)
        axes.grid(color="#e5e7eb", lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylim(1, None)
    left.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0.0, 0.98))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
