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
from node.policy import check_run, open_policy


def evaluate_run(loaded: Loaded, as_json: bool) -> None:
    """Evaluate, print the result as a table or as JSON, and keep it beside the checkpoints if that can be.

    Raises DataDirError if there is no run and no flag names a model.
    """
    config = loaded.config
    logs.configure(config.log)
    check_run(loaded)
    with open_policy(config) as current, _bars() as progress:
        evaluation = evaluate(config, current, progress)
    if as_json:
        print(evaluation.model_dump_json(indent=2))
    else:
        after = f"after round {evaluation.round}" if evaluation.round is not None else "untrained"
        print(f"{evaluation.model}, {after}: held-out accuracy in percent, {evaluation.samples} samples a task\n")
        print("\n".join(table(evaluation)))
    _keep(evaluation, DataDir(config.node.data_dir))


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
