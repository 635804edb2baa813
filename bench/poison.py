"""What can hostile nodes do to a swarm? `python -m bench.poison [--seeds 2] [--hostile 1 2]`.

Eight simulated nodes (`bench.sim`) by the product's defaults, of which the last one or two are hostile. Verifiers are
the worst that a swarm can have: they skip whatever stands before a right answer. Each attack is made on nodes without
any defence, which believe what others claim of rewards; on nodes that score all again themselves; on those that refuse
what is too unlikely as well, as the product does; and on those that do so, but give one peer as much room in a round as
it likes to fill. Told are the honest nodes' cumulative reward, and the share of their own completions with some of the
poison in them in the last tenth of the run.
"""

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.sim.attacks import ATTACKS
from bench.sim.jobs import Job, Outcome
from bench.sim.sections import MAIN, Section, runs
from bench.swarm import OUT, run_sections

DEFENCES: dict[str, dict[str, Any]] = {
    "none": {"trusting": True, "gate": False},
    "scored again": {"gate": False},
    "and gate": {"gate": True},
    "that without caps": {"gate": True, "per_peer": 8},
}
"""What of a plan they change."""

WHAT = {
    "silent": "nothing",
    "random text": "random text, said to be right half of the time",
    "junk": "right answers behind three symbols, others each time",
    "flood": "the same, four times as many groups",
    "symbol": "right answers behind one symbol",
    "rare symbol": "one of 64 right, behind one symbol",
    "poison": "right answers behind the same three symbols",
    "creeping": "the same, grown from none to three over the run",
    "copies": "what others sent, under the own name",
    "disguised copies": "the same, each with a wrong answer more",
    "failures": "wrong answers, said to be right half of the time",
}


Cell = tuple[str, int, str]
"""An attack, how many nodes make it, and a defence."""


def cells(name: str, hostile: Sequence[int], seeds: int, regime: str) -> dict[Cell, list[Job]]:
    """The runs of each cell of the tables of a configuration."""
    return {
        (attack, count, defence): runs(
            name, seeds, regime, hostile=count, attack=attack, lenient=True, **DEFENCES[defence]
        )
        for count in hostile
        for attack in ATTACKS
        for defence in DEFENCES
    }


def table(count: int, found: dict[Cell, list[Outcome]]) -> Table:
    """Reward in parts of what it is with those nodes silent, and the poison's share, for each defence."""
    result = Table(title=f"{count} of 8 nodes hostile", title_justify="left")
    result.add_column("they send")
    for defence in DEFENCES:
        result.add_column(f"{defence}: reward", justify="right")
        result.add_column("poison", justify="right")
    for attack in ATTACKS:
        row = [WHAT[attack]]
        for defence in DEFENCES:
            outcomes = found[attack, count, defence]
            reward, silent = (
                statistics.fmean(o.cumulative for o in each) for each in (outcomes, found["silent", count, defence])
            )
            row += [f"{reward:.1f} ({reward / silent:.0%})", f"{statistics.fmean(o.poisoned for o in outcomes):.1%}"]
        result.add_row(*row)
    return result


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--configuration", choices=[name for name in MAIN if name != "8/0"], default="default")
    parser.add_argument("--hostile", type=int, nargs="+", default=[1, 2], metavar="N", help="of eight nodes")
    parser.add_argument("--smoke", action="store_true", help="one seed, policies that are made in a minute")
    parser.add_argument("--out", type=Path, default=OUT, help="where runs are kept, those of bench.swarm too")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time, a core each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or not all(0 < count < 8 for count in arguments.hostile):
        parser.error("--seeds must be at least 1, --hostile from 1 to 7")
    seeds, regime = (1, "smoke") if arguments.smoke else (arguments.seeds, "specialists")
    jobs = cells(arguments.configuration, arguments.hostile, seeds, regime)
    section = Section("poison", {" ".join(map(str, key)): each for key, each in jobs.items()})
    outcomes = run_sections([section], arguments.out, arguments.workers)
    found = {key: [outcomes[job] for job in each] for key, each in jobs.items()}
    console = Console(width=max(Console().width, 170))
    for count in arguments.hostile:
        console.print(table(count, found))
    if arguments.json:
        rows = [
            {"attack": attack, "hostile": count, "defence": defence}
            | {"cumulative": [o.cumulative for o in each], "poisoned": [o.poisoned for o in each]}
            for (attack, count, defence), each in found.items()
        ]
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
