"""Does the real swarm say what the simulation says? `python -m bench.testnet [--nodes 8] [--rounds 100]`.

`swarmnode testnet` runs nodes of the tiny model as processes that talk over libp2p, once a configuration and seed, with
the same number of updates each: `8/0` trains alone, `4/4` shares by the paper's rule, `default` with the product's own
settings. Read are the `metrics.jsonl` that the nodes write. Each run has a directory in `--out`; the same command goes
on with a run that was interrupted and does not repeat a finished one. `--compare` sets the order of the configurations
beside that of `python -m bench.swarm --json FILE`; `--world` takes the specialised models and the tasks of that
simulation, as `python -m bench.swarm --export DIR` writes them.

The nodes wait for each other at the start alone: then each goes at its own pace, as everywhere in a real swarm, and one
that is ahead has fewer groups of others to choose from. `lag` tells how far they came apart: of eight tiny nodes on two
CPU cores the slowest was 7 to 14 rounds short of 100 when the first was done. A configuration takes about two minutes.
"""

import argparse
import signal
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.compared import (
    HeldOut,
    add_arguments,
    agreement,
    compare_runs,
    cumulative,
    draw,
    read_scores,
    show,
    write_json,
)
from bench.driving import Stop, go_on, held_out, say
from bench.runs import Case, Run, RunError, check_names, merged, place_of, rates, sharing_of
from node.config_sources import RECIPES
from node.errors import NodeError

LR = 2e-4
"""Of the tiny model on its own tasks: the fastest of those tried alone (docs/LOG.md), with a rate that stays."""
LR_FILES = 4e-4
"""Of the smaller models of the simulation."""
NEW_TOKENS_FILES = 8


def settings_of(tasks: Sequence[Path], lr: float, configuration: str) -> dict[str, Any]:
    """Settings of every node of a run; `tasks` are files of the verifier `exact`, or none for the tiny model's own."""
    recipe = tomllib.loads((RECIPES / "tiny.toml").read_text(encoding="utf-8"))
    own: dict[str, Any] = {"node": {"threads": 1}, "training": {"lr": lr}, "api": {"openai": False}}
    if tasks:
        own["tasks"] = {"mix": [{"verifier": "exact", "config": {"path": str(file.absolute())}} for file in tasks]}
        own["sampling"] = {"max_new_tokens": NEW_TOKENS_FILES}
    return merged(recipe, own, sharing_of(configuration))


def world_of(directory: Path, nodes: int) -> tuple[list[str], list[Path]]:
    """Models of the nodes and files of tasks of an exported simulation. Raises RunError if some are missing."""
    models = [directory / "models" / f"node-{number}" for number in range(1, nodes + 1)]
    missing = [path for path in models if not path.is_dir()]
    if missing:
        raise RunError(f"{missing[0]} is not there: --world needs a model for each of {nodes} nodes")
    tasks = sorted((directory / "tasks").glob("*.jsonl"))
    if not tasks:
        raise RunError(f"{directory / 'tasks'} holds no .jsonl file")
    return [str(path.absolute()) for path in models], tasks


def cases_of(arguments: argparse.Namespace, out: Path) -> list[Case]:
    """All runs, seed by seed. Raises RunError for arguments that make none."""
    check_names(arguments.configurations)
    models: list[str] = [named_model(name) for name in arguments.models]
    tasks = [] if arguments.tasks == ["tiny"] else [Path(name) for name in arguments.tasks]
    if arguments.world is not None:
        if models or tasks:
            raise RunError("--world brings models and tasks: leave out --models and --tasks")
        models, tasks = world_of(arguments.world, arguments.nodes)
    for file in tasks:
        if not file.is_file():
            raise RunError(f"--tasks {file}: no such file; give `tiny`, or files of questions and answers")
    if len(models) not in (0, 1, arguments.nodes):
        raise RunError(f"{len(models)} models for {arguments.nodes} nodes: give one, or one a node")
    lr = rates(arguments.lr, arguments.configurations, LR_FILES if tasks else LR)
    return [
        Case(
            configuration=name,
            seed=seed,
            directory=place_of(out, name, seed),
            nodes=arguments.nodes,
            models=tuple(models or ["tiny"]),
            settings=settings_of(tasks, lr[name], name),
            engine="transformers",
        )
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        for name in arguments.configurations
    ]


def named_model(name: str) -> str:
    """A directory in full, since nodes run elsewhere; any other name as it is."""
    return str(Path(name).absolute()) if Path(name).is_dir() else name


def measure(cases: Sequence[Case], arguments: argparse.Namespace, console: Console) -> int:
    """Run what is left to run and show what there is. Returns the exit status."""
    simulated = read_scores(arguments.compare) if arguments.compare else None
    finished: list[Run] = []
    scores: HeldOut = {}
    with Stop() as stop:
        for case in cases:
            run = go_on(case, arguments.rounds, stop, say)
            if run.rounds >= arguments.rounds:
                finished.append(run)
                if arguments.eval:
                    found = held_out(case, arguments.rounds, arguments.per_task, stop, say)
                    scores = {**scores, **({(case.configuration, case.seed): found} if found else {})}
        interrupted = stop.count > 0
    summaries = compare_runs(finished)
    title = f"{arguments.nodes} real nodes"
    if summaries:
        show(title, summaries, scores, console)
        draw(title, summaries, arguments.plot or place_of_plot(cases))
        if arguments.json:
            write_json(summaries, scores, arguments.json)
    if interrupted:
        say(f"{len(finished)} of {len(cases)} runs are done: the same command goes on")
        return 128 + signal.SIGINT
    if simulated is not None:
        console.print(agreement(cumulative(summaries), simulated)[1])
    return 0


def place_of_plot(cases: Sequence[Case]) -> Path:
    """The picture beside the runs' directories."""
    return cases[0].directory.parent / "reward.png"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; ends the process with a message for those that cannot be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_arguments(parser, nodes=8, rounds=100, rate=f"{LR}, files {LR_FILES}")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each configuration")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--models", nargs="+", default=[], metavar="DIR", help="one, or one a node; default: tiny")
    parser.add_argument("--tasks", nargs="+", default=["tiny"], metavar="FILE", help="`tiny`, or .jsonl for `exact`")
    parser.add_argument("--world", type=Path, metavar="DIR", help="models and tasks of an exported simulation")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="the simulation's figures")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the runs are kept; default: runs/testnet")
    parser.add_argument("--smoke", action="store_true", help="3 nodes, 10 rounds, kept nowhere unless --out is given")
    arguments = parser.parse_args(words)
    if arguments.smoke:
        arguments.nodes, arguments.rounds, arguments.seeds = 3, 10, 1
    if min(arguments.nodes, arguments.rounds, arguments.seeds, arguments.per_task) < 1 or arguments.first_seed < 0:
        parser.error("--nodes, --rounds, --seeds and --per-task must be at least 1, --first-seed at least 0")
    return arguments


def main() -> None:
    """Run, print, draw and write what was asked for."""
    arguments = parse()
    with ExitStack() as stack:
        out = arguments.out or Path("runs/testnet")
        if arguments.smoke and arguments.out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarmnode-testnet-")))
        try:
            status = measure(cases_of(arguments, out), arguments, Console(width=170))
        except (RunError, NodeError) as error:
            say(f"error: {error}")
            sys.exit(1)
    sys.exit(status)


if __name__ == "__main__":
    main()
