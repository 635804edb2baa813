"""Does the network stay flat as the swarm grows? `python -m bench.scale [--smoke]`: up to 100,000 nodes, simulated.

Costs are measured on this machine first (or taken from a file), links are as published (`bench.scaling.links`), rules
and limits are the product's. Real nodes check the simulation. Prints Markdown, draws a plot. What has been simulated is
kept in the output directory: the same command goes on with what is left. All of it takes some six minutes of one core.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from bench.scaling import report
from bench.scaling.costs import Costs, measure, read_costs, write_costs
from bench.scaling.plan import HEARD, Outcome, Plan, recommended
from bench.scaling.real import Seen, compare
from bench.scaling.use import Use, use
from bench.scaling.world import World

SIZES = (10, 100, 1_000, 10_000, 100_000)
MESSAGES = {10: 400, 100: 400, 1_000: 80, 10_000: 24, 100_000: 12}
"""Batches that are followed on each topic; there are the more topics the larger a swarm is."""

PER_SHARDS = (200, 100, 50, 20, 10, 5)
"""Nodes a shard of a swarm of 2,000, to see how few are too few."""

OUT = Path("runs/scale")
_OUTCOME = TypeAdapter(Outcome)


def plans(sizes: Sequence[int]) -> dict[str, dict[int, Plan]]:
    """The swarms of each row."""
    base = {nodes: replace(recommended(nodes), messages=MESSAGES.get(nodes, 24)) for nodes in sizes}
    large = {nodes: plan for nodes, plan in base.items() if plan.shards > 1}
    return {
        report.BASE: base,
        report.CHURN: {nodes: replace(plan, churn=0.3) for nodes, plan in base.items()},
        report.RIDERS: {nodes: replace(plan, riders=0.2) for nodes, plan in base.items()},
        report.ONE: {nodes: replace(plan, shards=1, subscribe=1) for nodes, plan in large.items()},
        report.BLIND: {nodes: replace(plan, looking=False) for nodes, plan in large.items()},
    }


def sweep(nodes: int, per_shard: Sequence[int]) -> dict[str, dict[int, Plan]]:
    """One swarm with so many nodes a shard, by that number."""
    base = {each: Plan(nodes, nodes // each, HEARD, messages=40) for each in per_shard}
    churn = {each: replace(plan, churn=0.3) for each, plan in base.items()}
    return {report.BASE: base, report.CHURN: churn}


def simulate(chosen: dict[str, dict[int, Plan]], costs: Costs, directory: Path) -> report.Rows:
    """Run what has not been run with these costs, telling on stderr how far it is."""
    directory.mkdir(parents=True, exist_ok=True)
    rows: dict[str, dict[int, tuple[Plan, Outcome]]] = {}
    for name, sizes in chosen.items():
        rows[name] = {}
        for nodes, plan in sizes.items():
            key = hashlib.sha256(json.dumps([asdict(plan), asdict(costs)]).encode()).hexdigest()[:16]
            path = directory / f"{key}.json"
            if not path.exists():
                outcome = World(plan, costs).run()
                path.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
                print(f"{nodes} nodes, {name}: {outcome.seconds:.0f} s", file=sys.stderr)
            rows[name][nodes] = plan, _OUTCOME.validate_python(json.loads(path.read_bytes()))
    return rows


def main() -> None:
    """Measure, check, simulate, print, draw, write."""
    parser = argparse.ArgumentParser(description="Bytes, coverage and time in simulated swarms of up to 100,000 nodes.")
    parser.add_argument("--smoke", action="store_true", help="swarms of 10 to 300, and 6 real nodes for some seconds")
    parser.add_argument("--sizes", type=int, nargs="+", default=[*SIZES], metavar="N", help="nodes of a swarm")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="of --write-costs, instead of measuring")
    parser.add_argument("--write-costs", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--no-real", action="store_true", help="do not run real nodes to check the simulation")
    parser.add_argument("--out", type=Path, default=OUT, help="where outcomes are kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="default: scale.png in --out")
    arguments = parser.parse_args()
    if min(arguments.sizes) < 2:
        parser.error("--sizes: a swarm has two nodes at least")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the plot takes matplotlib: pip install -e '.[bench]'")
    try:
        costs = measure(4 if arguments.smoke else 24) if arguments.costs is None else read_costs(arguments.costs)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if arguments.write_costs:
        write_costs(costs, arguments.write_costs)
    print(report.cost_table(costs), end="\n\n", flush=True)
    checked = None if arguments.no_real else _checked(costs, arguments.smoke)
    rows = simulate(plans((10, 100, 300) if arguments.smoke else arguments.sizes), costs, arguments.out)
    found = simulate(sweep(200, (50, 10)) if arguments.smoke else sweep(2_000, PER_SHARDS), costs, arguments.out)
    uses = _uses(costs, arguments.smoke)
    _show(rows, found, uses)
    report.draw(rows, arguments.plot or arguments.out / "scale.png")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        content = _content(costs, checked, rows, found, uses)
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _checked(costs: Costs, smoke: bool) -> tuple[Seen, Seen, Seen]:
    seen = compare(6, 3, 1.0, costs) if smoke else compare(16, 40, 8.0, costs)
    print(report.check_table(seen), end="\n\n", flush=True)
    return seen


def _uses(costs: Costs, smoke: bool) -> list[Use]:
    seconds = Plan.round_seconds
    return [use(10, costs, seconds, 6)] if smoke else [use(heard, costs, seconds) for heard in (9, 99, 199)]


def _show(rows: report.Rows, found: report.Rows, uses: Sequence[Use]) -> None:
    tables = report.main_table(rows), report.detail_table(rows), report.sweep_table(found), report.use_table(uses)
    for table in tables:
        print(table, end="\n\n")
    flat = report.flatness(rows)
    if flat is not None:
        print(f"Bytes of a node in the largest swarm over those with 1,000 nodes: {flat:.2f}")


def _content(
    costs: Costs, checked: Sequence[Seen] | None, rows: report.Rows, found: report.Rows, uses: Sequence[Use]
) -> dict[str, Any]:
    swarms, per_shard = (
        [
            {"row": name, "plan": asdict(plan), "outcome": _finite(asdict(outcome))}
            for name, sizes in some.items()
            for plan, outcome in sizes.values()
        ]
        for some in (rows, found)
    )
    names = "real", "simulated", "simulated_one_core"
    return {
        "costs": asdict(costs),
        "check": checked and {name: asdict(one) for name, one in zip(names, checked, strict=True)},
        "swarms": swarms,
        "per_shard": per_shard,
        "use": [asdict(one) for one in uses],
        "flat": report.flatness(rows),
    }


def _finite(value: Any) -> Any:
    """What never happens is null: JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
