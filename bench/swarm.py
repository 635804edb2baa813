"""Does sharing pay? `python -m bench.swarm [SECTION ...] [--smoke]`: the paper's experiment, with controls.

Swarms of eight tiny policies in one process (`bench.sim`), under the product's own round, selection, gate, pool,
advantage and loss. Every number is about a node's own rollouts or about held-out prompts; what others send never counts
as reward. Runs are kept in the output directory: what was interrupted goes on with the same command.

The section `headline` takes half an hour on two free cores, six minutes of it for the first policies, and all together
twice that: the others have one seed each, and docs/LOG.md says how many its figures have (`--seeds`). Ctrl-C loses only
the runs in hand.
"""

import argparse
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from bench.sim import report
from bench.sim.jobs import Job, Outcome, run_all
from bench.sim.regimes import CONFIGURATIONS, REGIMES, policies
from bench.sim.sections import (
    LONG,
    MAIN,
    SHORT,
    Section,
    asynchrony,
    headline,
    long_run,
    regimes,
    sizes,
    smoke,
    strategies,
    tuning,
)
from bench.sim.stack import export
from bench.sim.tasks import Codec, load_kinds, write_files
from bench.tiny_vocab import build_tokenizer

OUT = Path("runs/swarm")

SECTIONS: dict[str, Callable[[int], list[Section]]] = {
    "headline": lambda _: [headline(15, 3)],
    "long": lambda seeds: [long_run(seeds)],
    "regimes": regimes,
    "strategies": lambda seeds: [strategies(seeds)],
    "asynchrony": asynchrony,
    "sizes": sizes,
}
"""What makes each, of how many seeds. The headline has its own number."""

TUNE: dict[str, Callable[[int], list[Section]]] = {
    "tune": lambda _: [tuning(list(CONFIGURATIONS), SHORT)],
    "tune-long": lambda _: [tuning(MAIN, LONG)],
}


def run_sections(sections: Sequence[Section], directory: Path, workers: int) -> dict[Job, Outcome]:
    """Run all of them, telling on stderr how far it is."""
    begun = time.monotonic()

    def tell(done: int, of: int, job: Job, outcome: Outcome) -> None:
        print(
            f"{done}/{of} after {time.monotonic() - begun:.0f} s: {job.regime}, {outcome.cumulative:.2f} in"
            f" {len(outcome.reward)} rounds",
            file=sys.stderr,
        )

    return run_all([job for s in sections for jobs in s.rows.values() for job in jobs], directory, workers, tell)


def export_world(directory: Path, out: Path) -> None:
    """Write the specialists' first policies and their tasks for real nodes: `models/node-1` ... and `tasks/*.jsonl`."""
    # As in the workers, which have one core each: sums of two threads differ by rounding.
    torch.set_num_threads(1)
    kinds, codec = load_kinds(), Codec(build_tokenizer())
    files = write_files(kinds, out / "tasks")
    [stack] = policies(REGIMES["specialists"], 1, kinds, codec, directory / "policies")
    for node in range(stack.nodes):
        export(stack, node, out / "models" / f"node-{node + 1}", codec.tokenizer)
    print(f"{stack.nodes} models and {len(files)} kinds of task are in {out}", file=sys.stderr)


def main() -> None:
    """Run, print, draw, write."""
    parser = argparse.ArgumentParser(description="Does sharing pay? Simulated swarms of tiny policies, with controls.")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join([*SECTIONS, *TUNE])}; default all")
    parser.add_argument("--smoke", action="store_true", help="one seed of the headline's main rows, in three minutes")
    parser.add_argument("--out", type=Path, default=OUT, help="where runs, tables and plots are kept")
    parser.add_argument("--json", type=Path, help="{configuration: [cumulative reward a seed]} of the first table")
    parser.add_argument("--seeds", type=int, default=1, help="runs of a row in all sections but the headline")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time, a core each")
    parser.add_argument("--export", type=Path, metavar="DIR", help="only write models and tasks for bench.testnet")
    arguments = parser.parse_args()
    unknown = set(arguments.sections) - {*SECTIONS, *TUNE}
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join([*SECTIONS, *TUNE])}")
    if min(arguments.workers, arguments.seeds) < 1:
        parser.error("--workers and --seeds must be at least 1")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the plots take matplotlib: pip install -e '.[bench]'")
    if arguments.export:
        export_world(arguments.out, arguments.export)
        return
    if arguments.smoke and arguments.sections:
        parser.error("--smoke is a section of its own")
    named = arguments.sections or list(SECTIONS)
    known = SECTIONS | TUNE
    chosen = [smoke()] if arguments.smoke else [section for name in named for section in known[name](arguments.seeds)]
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
    try:
        outcomes = run_sections(chosen, arguments.out, arguments.workers)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on with what is left", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    show(chosen, outcomes, arguments.out)
    if arguments.json:
        rows = chosen[0].rows
        found = {name: [outcomes[job].cumulative for job in jobs] for name, jobs in rows.items()}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def show(sections: Sequence[Section], outcomes: dict[Job, Outcome], directory: Path) -> None:
    """Print the tables, write them as CSV, draw the curves."""
    # Wide enough for all columns where the output is a file.
    console = Console(width=max(Console().width, 190))
    for section in sections:
        console.print(report.table(section, outcomes))
        name = "".join(c if c.isalnum() else "-" for c in section.title.partition(":")[0].lower())
        report.write_csv([section], outcomes, directory / f"{name}.csv")
        if section.curves:
            report.draw(section, outcomes, directory / f"{name}.png")


if __name__ == "__main__":
    main()
