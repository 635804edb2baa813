"""Does sharing pay for a real language model? `python -m bench.language [--nodes 4] [--rounds 50]`.

Real nodes train SmolLM2-135M-Instruct (what `--model auto` means without a GPU) on the tasks of its recipe, by
`swarmnode testnet`: `8/0` alone, `4/4` by the paper's rule, `default` with the product's own settings, the same number
of updates each. `--slice` rounds of each configuration are run in turn, so that whatever has been run when it is
interrupted compares equal numbers of rounds. SIGINT or SIGTERM at any time has all nodes save and shows what there is;
the same command goes on, with more `--rounds` too.

Four nodes on two CPU cores with vLLM take about 25 s a round beside other heavy work: alone most of it is sampling,
sharing most of it is the update. Loading takes a minute at the start of every slice, and only there the nodes wait for
each other. All need 16 GB of memory. `--eval` takes one to three minutes a node.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.compared import HeldOut, add_arguments, compare_runs, draw, show, write_json
from bench.driving import Stop, go_on, held_out, say
from bench.runs import Case, RunError, check_names, merged, place_of, rates, read_run, sharing_of
from node.errors import NodeError

LR = 2e-4
"""That of the recipe."""


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """One run a configuration. Raises RunError for arguments that make none."""
    check_names(arguments.configurations)
    lr = rates(arguments.lr, arguments.configurations, LR)
    cases = []
    for name in arguments.configurations:
        settings: dict[str, Any] = {"training": {"lr": lr[name]}, "api": {"openai": False}}
        if arguments.memory_gb:
            settings["engine"] = {"memory_gb": arguments.memory_gb}
        cases.append(
            Case(
                configuration=name,
                seed=arguments.seed,
                directory=place_of(arguments.out, name, arguments.seed),
                nodes=arguments.nodes,
                models=(arguments.model,),
                settings=merged(settings, sharing_of(name)),
                engine=arguments.engine,
            )
        )
    return cases


def train(cases: Sequence[Case], rounds: int, size: int, stop: Stop) -> None:
    """Bring all runs to round `rounds`, `size` rounds of each in turn, until `stop` is told.

    The shortest run goes first, wherever an earlier command left them. Raises RunError.
    """
    for target in [*range(size, rounds, size), rounds]:
        for case in cases:
            before = read_run(case)
            if stop.count > 0 or before.rounds >= target:
                continue
            run = go_on(case, target, stop, say)
            done = run.rounds - before.rounds
            took = f", {(run.seconds - before.seconds) / done:.0f} s a round with loading" if done > 0 else ""
            say(f"{case.configuration} seed {case.seed}: {run.rounds} of {rounds} rounds are done{took}")


def measure(cases: Sequence[Case], arguments: argparse.Namespace, console: Console) -> int:
    """Run what is left to run and show what there is. Returns the exit status."""
    scores: HeldOut = {}
    with Stop() as stop:
        train(cases, arguments.rounds, arguments.slice, stop)
        runs = [run for run in (read_run(case) for case in cases) if run.rounds > 0]
        for run in runs if arguments.eval and stop.count == 0 else ():
            found = held_out(run.case, arguments.rounds, arguments.per_task, stop, say)
            scores = {**scores, **({(run.case.configuration, run.case.seed): found} if found else {})}
        interrupted = stop.count > 0
    summaries = compare_runs(runs)
    if summaries:
        title = (
            f"{arguments.nodes} real nodes, {'SmolLM2-135M-Instruct' if arguments.model == 'auto' else arguments.model}"
        )
        show(title, summaries, scores, console)
        draw(title, summaries, arguments.plot or arguments.out / "reward.png")
        if arguments.json:
            write_json(summaries, scores, arguments.json)
    if interrupted:
        say("interrupted: the same command goes on")
        return 128 + signal.SIGINT
    return 0


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; ends the process with a message for those that cannot be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_arguments(parser, nodes=4, rounds=50, rate=str(LR))
    parser.add_argument("--slice", type=int, default=10, help="rounds of each configuration in turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="auto", help="as [model] name")
    parser.add_argument("--engine", choices=["auto", "vllm", "transformers"], default="auto")
    parser.add_argument("--memory-gb", type=float, help="GiB a node for its engine's cache; default: by what is free")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("runs/language"), help="where runs are kept")
    arguments = parser.parse_args(words)
    if min(arguments.nodes, arguments.rounds, arguments.slice, arguments.per_task) < 1 or arguments.seed < 0:
        parser.error("--nodes, --rounds, --slice and --per-task must be at least 1, --seed at least 0")
    if Path(arguments.model).is_dir():
        arguments.model = str(Path(arguments.model).absolute())
    return arguments


def main() -> None:
    """Run, print, draw and write what was asked for."""
    arguments = parse()
    try:
        status = measure(cases_of(arguments), arguments, Console(width=170))
    except (RunError, NodeError) as error:
        say(f"error: {error}")
        sys.exit(1)
    sys.exit(status)


if __name__ == "__main__":
    main()
