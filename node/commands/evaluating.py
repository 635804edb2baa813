"""`swarmnode eval`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from node import logs
from node.config_sources import Loaded
from node.datadir import DataDir, write_atomically
from node.errors import file_problem
from node.evaluation import Evaluation, Progress, evaluate, table
from node.policy import best, check_run, newest, open_policy
from node.versus import lines_of, versus


def evaluate_run(loaded: Loaded, as_json: bool, of_best: bool = False) -> None:
    """Evaluate, print the result as a table or as JSON, and keep it beside the checkpoints if that can be.

    `of_best` takes the best checkpoint instead of the newest. Raises DataDirError if there is no run and no flag names
    a model, NodeError if there is no best one.
    """
    config = loaded.config
    logs.configure(config.log)
    check_run(loaded)
    with open_policy(config, best if of_best else newest) as current, _bars() as progress:
        evaluation = evaluate(config, current, progress)
    if as_json:
        print(evaluation.model_dump_json(indent=2))
    else:
        after = f"after round {evaluation.round}" if evaluation.round is not None else "untrained"
        print(f"{evaluation.model}, {after}: held-out accuracy in percent, {evaluation.samples} samples a task\n")
        print("\n".join(table(evaluation)))
    _keep(evaluation, DataDir(config.node.data_dir))


def compare_policy(loaded: Loaded, against: str, as_json: bool, of_best: bool = False) -> None:
    """Measure the policy and another one on the same tasks, and print both with their difference.

    `against` is as in `node.versus.Opponent.at`. Raises NodeError if either is missing.
    """
    config = loaded.config
    logs.configure(config.log)
    check_run(loaded)
    with _bars() as progress:
        result = versus(config, against, best if of_best else newest, progress)
    print(result.model_dump_json(indent=2) if as_json else "\n".join(lines_of(result)))


def _keep(evaluation: Evaluation, data: DataDir) -> None:
    if not data.path.is_dir():
        return
    try:
        write_atomically(data.evaluation_path, evaluation.model_dump_json(indent=2).encode() + b"\n")
    except OSError as error:
        print(f"warning: the result could not be kept: {file_problem(error) or error}", file=sys.stderr)


@contextmanager
def _bars() -> Iterator[Progress]:
    """Progress bars on a terminal, one line a step elsewhere."""
    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    with Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:

        def report(what: str, done: int, total: int, unit: str) -> None:
            if what not in tasks:
                if not console.is_terminal:
                    print(f"{what} ...", file=sys.stderr)
                for task in tasks.values():
                    bars.remove_task(task)
                tasks.clear()
                tasks[what] = bars.add_task(what, total=total, unit=unit)
            bars.update(tasks[what], completed=done, total=total)

        yield report
