"""Tables in Markdown, and a picture."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.net.measuring import Figures

NAMES = {
    "tcp": "raw TCP",
    "libp2p": "raw py-libp2p gossip",
    "gossip": "gossip",
    "relay": "gossip, check and store",
    "node": "whole node",
}
STAGES = ("encode", "compress", "sign", "verify", "decompress", "decode", "regenerate", "score", "store")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(found: Figures) -> None:
    """Print the tables."""
    print(speeds(found), delays(found), sep="\n\n")
    if found["stages"]:
        print("", costs(found), "", admission(found), sep="\n")


def speeds(found: Figures) -> str:
    """As fast as it goes."""
    rows = []
    for nodes, by_size in found["fast"].items():
        for size, by_kind in by_size.items():
            peer = by_kind["libp2p"]["batches"]
            for kind, one in by_kind.items():
                spread = f"{one['batches']:,.0f} ({min(one['each']):,.0f}-{max(one['each']):,.0f})"
                rate = f"{one['bytes'] / 1e6:,.1f}"
                cpu = f"{1e3 * one['send_cpu']:.2f} / {1e3 * one['receive_cpu']:.2f}"
                ratio = f"{one['batches'] / peer:.2f}" if peer else "-"
                rows.append([nodes, size, NAMES[kind], spread, rate, ratio, cpu, _percent(one["lost"])])
    head = ["nodes", "KB", "", "batches/s", "MB/s", "of py-libp2p", "CPU ms a batch, publisher / other", "lost"]
    return _table(head, rows)


def delays(found: Figures) -> str:
    """At a steady rate."""
    rows = []
    for nodes, by_size in found["steady"].items():
        for size, by_kind in by_size.items():
            for kind, one in by_kind.items():
                arrived, stored = _milliseconds(one["arrived"]), _milliseconds(one["stored"])
                lost = [_percent(one["lost"]), "-" if one["stored"] is None else _percent(one["unstored"])]
                rows.append([nodes, size, f"{one['rate']:g}", NAMES[kind], *arrived, *stored, *lost])
    head = ["nodes", "KB", "batches/s", "", "arrived p50", "p99", "most", "stored p50", "p99", "most"]
    head += ["lost by gossip", "in no pool"]
    return _table(head, rows)


def costs(found: Figures) -> str:
    """CPU of each stage."""
    sizes = list(found["stages"])
    rows = [[stage, *(f"{1e3 * found['stages'][size][stage]:.2f}" for size in sizes)] for stage in STAGES]
    pair: Mapping[str, Figures] = found["fast"].get("2", {})
    if all(size in pair for size in sizes):
        for name, key in (("gossip, sending", "send_cpu"), ("gossip, receiving", "receive_cpu")):
            rows.append([name, *(f"{1e3 * pair[size]['gossip'][key]:.2f}" for size in sizes)])
    return _table(["CPU ms a batch", *(f"{size} KB" for size in sizes)], rows)


def admission(found: Figures) -> str:
    """What one node can admit."""
    rows = []
    for size, one in found["admits"].items():
        shape = found["shapes"][size]
        shaped = f"{shape['groups']} x {shape['completions']} x {shape['characters']}"
        rates = [f"{one[key]:,.0f}" for key in ("checked", "checked_meanwhile")]
        rows.append([size, shaped, *rates, f"{one['stored']:,.1f}", f"{one['groups']:,.0f}", _percent(one["lost"])])
    head = [
        "KB",
        "groups x answers x characters",
        "checked/s",
        "the same while admitting",
        "admitted/s",
        "groups/s",
        "lost",
    ]
    return _table(head, rows)


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:.1f} %"


def _milliseconds(values: Sequence[float] | None) -> list[str]:
    return ["-"] * 3 if values is None else [f"{1e3 * value:,.0f} ms" for value in values]


def draw(found: Figures, path: Path) -> None:
    """Batches a second of each kind by size, a panel for each number of nodes."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("the plot takes matplotlib: pip install -e '.[bench]'")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = found["fast"]
    size = 4 * len(panels), 3.6
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False, sharey=True)
    for axis, (nodes, by_size) in zip(axes[0], panels.items(), strict=True):
        for number, kind in enumerate(("tcp", "libp2p", "gossip", "relay")):
            places = [place + 0.2 * (number - 1.5) for place in range(len(by_size))]
            axis.bar(places, [by_kind[kind]["batches"] for by_kind in by_size.values()], 0.2, label=NAMES[kind])
        axis.set(title=f"{nodes} nodes", yscale="log", ylabel="batches/s" if axis is axes[0][0] else "")
        axis.set_xticks(range(len(by_size)), [f"{size} KB" for size in by_size])
    axes[0][0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
