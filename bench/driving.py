"""Makes the runs of `bench.runs`: starts a case's testnet, goes on with one that was interrupted, and ends it."""

import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

import tomli_w

from bench.nodes import start
from bench.runs import Case, Notes, Run, RunError, merged, read_run
from node.config import SharingSettings
from node.datadir import DataDir
from rl.settings import TrainingSettings

Say = Callable[[str], None]
"""Told a line of progress."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_SECONDS = 0.5
_SAY_SECONDS = 20.0
_SILENT = {"evaluation": {"every": 0}}
"""Evaluations while training take no part in the rounds, but time, and so change what nodes hear of each other."""

_TAIL = 30
"""Lines shown of the log of a testnet that failed."""


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


class Stop:
    """Notes SIGINT and SIGTERM while it is entered, from the main thread, instead of ending the process."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def go_on(case: Case, rounds: int, stop: Stop, say: Say) -> Run:
    """Run a case until every node has done round `rounds`, or `stop` is told: then its nodes save and end.

    Nothing is started if there is nothing left to do. Raises RunError if a node fails or the directory holds a run
    with other settings.
    """
    _prepare(case)
    run = read_run(case)
    if run.rounds < rounds and stop.count == 0:
        status = _Watched(case, rounds, say).run(stop)
        run = read_run(case)
        if stop.count == 0 and (status != 0 or run.rounds < rounds):
            raise RunError(_why_failed(case, status))
    return run


class _Watched:
    """The testnet of a case while it runs."""

    def __init__(self, case: Case, rounds: int, say: Say) -> None:
        self._case = case
        self._rounds = rounds
        self._say = say
        self._notes = Notes.read(case.directory)
        self._before = self._notes.seconds
        self._begun = time.monotonic()

    def run(self, stop: Stop) -> int:
        """Returns the exit status."""
        try:
            with (self._case.directory / "testnet.log").open("ab") as log:
                return _run(self._case.command(self._rounds), log, stop, self._look)
        finally:
            self._note_seconds()

    def _look(self, stopping: bool) -> None:
        self._note_seconds()
        if stopping:
            self._say("stopping: every node saves its last round; a second signal kills them")
        else:
            self._say(_progress(read_run(self._case), self._rounds))

    def _note_seconds(self) -> None:
        self._notes.seconds = self._before + time.monotonic() - self._begun
        self._notes.write(self._case.directory)


def _run(command: Sequence[str], output: IO[bytes], stop: Stop, look: Callable[[bool], None]) -> int:
    """Run a process that `stop` ends and that never outlives this one. Returns its exit status.

    `look` is called every now and then, and with True when it is told to stop.
    """
    # A Ctrl-C at the terminal comes to this process, which hands it on once.
    process = start(command, output)
    try:
        told, looked = 0, time.monotonic()
        while True:
            try:
                return process.wait(_LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            if stop.count > told:
                told = stop.count
                look(True)
                process.send_signal(signal.SIGTERM)
            if time.monotonic() > looked + _SAY_SECONDS:
                looked = time.monotonic()
                look(False)
    finally:
        process.kill()
        process.wait()


def _progress(run: Run, rounds: int) -> str:
    """One line: how far the slowest node is, and the reward of late."""
    done = [len(records) for records in run.nodes]
    recent = [record.reward_local for records in run.nodes for record in records[-10:]]
    reward = f", reward of the last rounds {statistics.fmean(recent):.3f}" if recent else ""
    fastest = f" (the fastest node {max(done)})" if max(done) > min(done) else ""
    return f"{run.case.configuration} seed {run.case.seed}: round {min(done)} of {rounds}{fastest}{reward}"


def _prepare(case: Case) -> None:
    """The directory with `node.toml`. Raises RunError if it belongs to something else."""
    begun_with = {
        "nodes": case.nodes,
        "models": list(case.models),
        "engine": case.engine,
        "settings": json.loads(json.dumps(merged(_defaults(case.settings), case.settings))),
    }
    notes = Notes.read(case.directory)
    if notes.begun_with and notes.begun_with != begun_with:
        changed = ", ".join(sorted(key for key in begun_with if notes.begun_with.get(key) != begun_with[key]))
        raise RunError(f"{case.directory} was begun with other {changed}: go on with the same, or give another --out")
    if not notes.begun_with and case.directory.is_dir() and any(case.directory.iterdir()):
        raise RunError(f"{case.directory} holds something else: give another --out")
    case.directory.mkdir(parents=True, exist_ok=True)
    (case.directory / "node.toml").write_text(tomli_w.dumps(merged(_SILENT, case.settings)), encoding="utf-8")
    notes.begun_with = begun_with
    notes.write(case.directory)


def _defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """How the product learns and shares where the case leaves it alone: a later version may do it otherwise."""
    sections = {"sharing": SharingSettings, "training": TrainingSettings}
    return {name: kind(**settings.get(name, {})).model_dump() for name, kind in sections.items()}


def _why_failed(case: Case, status: int) -> str:
    log = case.directory / "testnet.log"
    return f"{case.configuration} seed {case.seed} failed (status {status}); the end of {log}:\n{_tail(log)}"


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:])


def held_out(case: Case, rounds: int, per_task: int, stop: Stop, say: Say) -> list[tuple[float, float]] | None:
    """Held-out accuracy of base model and policy of each node, sampled as in training, by `swarmnode eval`.

    One that was made at this round is read instead of made again. None if `stop` was told. Raises RunError if an
    evaluation fails.
    """
    scores = []
    for node in range(1, case.nodes + 1):
        data = case.data(node)
        if not _is_evaluated(data, rounds):
            if stop.count > 0:
                return None
            say(f"{case.configuration} seed {case.seed}: evaluating node {node} of {case.nodes}")
            command = [sys.executable, "-m", "node.cli", "eval", "--json", "--data-dir", str(data.path)]
            log = case.directory / "eval.log"
            with log.open("wb") as file:
                status = _run([*command, "--per-task", str(per_task)], file, stop, lambda stopping: None)
            if status != 0 and stop.count > 0:
                return None
            if status != 0:
                raise RunError(f"the evaluation of {data.path} failed (status {status}):\n{_tail(log)}")
        overall = json.loads(data.evaluation_path.read_text(encoding="utf-8"))["overall"]
        scores.append((float(overall["base"]["sampled"]["mean"]), float(overall["policy"]["sampled"]["mean"])))
    return scores


def _is_evaluated(data: DataDir, rounds: int) -> bool:
    try:
        return bool(json.loads(data.evaluation_path.read_text(encoding="utf-8"))["round"] == rounds)
    except FileNotFoundError:
        return False
