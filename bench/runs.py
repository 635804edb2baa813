"""Runs of real nodes that are to be compared: what `bench.testnet` and `bench.language` share.

A run is `swarmnode testnet` in a directory of its own. What came out is read from the `metrics.jsonl` of its nodes
alone, so a run may be interrupted at any time and gone on with by the same command. Runs are compared over the rounds
that all nodes of all of them have done: the same number of updates.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

import tomli_w

from node.datadir import DataDir
from node.record import MetricsFile, Record
from rl.selection import STRATEGIES
from verifiers import launch

Say = Callable[[str], None]
"""Told a line of progress."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_SECONDS = 0.5
_SAY_SECONDS = 20.0
_TAIL = 30
"""Lines shown of the log of a testnet that failed."""


class RunError(Exception):
    """A run cannot be made, or failed. The message says why."""


@dataclass(frozen=True)
class Case:
    """One configuration from one seed. `settings` is a tree as in the TOML file; `models` has one name, or one a node.

    `engine` None leaves the choice to the node.
    """

    configuration: str
    seed: int
    directory: Path
    nodes: int
    models: tuple[str, ...]
    settings: Mapping[str, Any]
    engine: str | None = None

    def data(self, node: int) -> DataDir:
        """The data directory of node 1, 2 ..."""
        return DataDir(self.directory / f"node-{node}")

    def command(self, rounds: int) -> list[str]:
        """`swarmnode testnet` up to round `rounds`."""
        words = [sys.executable, "-m", "node.cli", "testnet", "--no-tty", "--dir", str(self.directory)]
        words += ["--nodes", str(self.nodes), "--rounds", str(rounds), "--config", str(self.directory / "node.toml")]
        # Seeds of a testnet's nodes follow each other.
        words += ["--seed", str(1 + 1000 * self.seed)]
        words += ["--engine", self.engine] if self.engine is not None else []
        return words + [word for model in self.models for word in ("--model", model)]


@dataclass(frozen=True)
class Run:
    """What came out of a case: the records of each node, rounds 1, 2, ... The record of a node may be longer."""

    case: Case
    nodes: tuple[tuple[Record, ...], ...]
    seconds: float
    """Wall-clock time of all its testnets, loading included."""

    @property
    def rounds(self) -> int:
        """Rounds that every node has done."""
        return min(len(records) for records in self.nodes)


@dataclass(frozen=True)
class Summary:
    """The first `rounds` rounds of a run. Rewards are those of the nodes' own rollouts."""

    configuration: str
    seed: int
    rounds: int
    cumulative: float
    """Sum over the rounds of the mean over nodes."""
    final: float
    """Mean over nodes and the last tenth of the rounds."""
    worst: float
    """The cumulative reward of the node that has least."""
    generated_groups: int
    """Of all nodes, as the counts below."""
    external_groups: int
    tokens_generated: int
    tokens_trained: int
    refused: int
    """Rewarded external completions that the likelihood gate refused."""
    threshold: float | None
    """Of the gate, in nats a token: median over nodes of the last one; None if there is none."""
    informative: float
    """Groups of an update whose rewards differ, own and external; mean over nodes and rounds."""
    lag: int
    """How many rounds the slowest node was short of the last one when the first node had done it."""
    seconds: float
    curve: list[float] = field(repr=False)
    """Mean reward over nodes, a round."""


def sharing_of(configuration: str) -> dict[str, Any]:
    """The settings that a configuration's name stands for.

    `I/0` trains alone on I groups of its own; `I/J` is the paper's rule (arXiv 2509.08721, section 4), uniform over
    groups, whoever sent them, and without a gate; `default` leaves the product's settings as they are; a strategy's
    name changes that alone. Raises RunError for any other name.
    """
    if configuration == "default":
        return {}
    if configuration in STRATEGIES:
        return {"sharing": {"selection": configuration}}
    own, slash, others = configuration.partition("/")
    if not (slash and own.isdecimal() and others.isdecimal() and int(own) > 0):
        known = ", ".join(("default", *STRATEGIES))
        raise RunError(f"{configuration!r} is no configuration: it can be I/J such as 4/4, or one of {known}")
    # Both were tuned in the simulation.
    if int(others) == 0:
        return {"sharing": {"silo": True, "alone": int(own)}, "training": {"decay_after": 50}}
    sharing = {"local": int(own), "external": int(others), "selection": "uniform"}
    sharing |= {"half_life": 0.0, "per_peer": int(others), "reuse": 1}
    return {"sharing": sharing, "training": {"gate": False, "decay_after": 50}}


def check_names(configurations: Sequence[str]) -> None:
    """Raises RunError for a name that is none, or is given twice: both would share a directory."""
    for name in configurations:
        sharing_of(name)
    if len(set(configurations)) < len(configurations):
        raise RunError(f"--configurations {' '.join(configurations)}: one is given twice")


def rates(words: Sequence[str], configurations: Sequence[str], usual: float) -> dict[str, float]:
    """Learning rate of each configuration, from words like `4e-4` for all and `default=2e-4` for one.

    Raises RunError for a word that is neither.
    """
    found = dict.fromkeys(configurations, usual)
    for word in sorted(words, key=lambda word: "=" in word):
        name, equals, number = word.rpartition("=")
        if equals and name not in found:
            raise RunError(f"--lr {word}: {name!r} is not among the configurations {', '.join(configurations)}")
        try:
            rate = float(number)
        except ValueError:
            raise RunError(f"--lr {word}: give a RATE for all, or NAME=RATE for one") from None
        found.update({name: rate} if equals else dict.fromkeys(configurations, rate))
    return found


def merged(*trees: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of which the later win. Tables are merged by key, all else is replaced."""
    whole: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            known = whole.get(key)
            whole[key] = merged(known, value) if isinstance(known, dict) and isinstance(value, Mapping) else value
    return whole


def place_of(out: Path, configuration: str, seed: int) -> Path:
    """The absolute directory of a run."""
    return out.absolute() / f"{configuration.replace('/', '-')}-{seed}"


def read_run(case: Case) -> Run:
    """What there is of a case so far; no records where it has not begun. Raises RecordError for a damaged record."""
    nodes = tuple(tuple(MetricsFile(case.data(n).metrics_path).read()) for n in range(1, case.nodes + 1))
    return Run(case, nodes, _Notes.read(case.directory).seconds)


def summarise(run: Run, rounds: int) -> Summary:
    """Raises ValueError if the run has not as many rounds, or `rounds` is 0."""
    if not 0 < rounds <= run.rounds:
        raise ValueError(f"{run.case.directory} has {run.rounds} rounds of every node, not {rounds}")
    nodes = [records[:rounds] for records in run.nodes]
    every = [record for records in nodes for record in records]
    curve = [statistics.fmean(record.reward_local for record in at) for at in zip(*nodes, strict=True)]
    first = min(records[-1].time for records in nodes)
    known = [[r.gate_threshold for r in records if r.gate_threshold is not None] for records in nodes]
    thresholds = [values[-1] for values in known if values]
    return Summary(
        configuration=run.case.configuration,
        seed=run.case.seed,
        rounds=rounds,
        cumulative=sum(curve),
        final=statistics.fmean(curve[-max(1, rounds // 10) :]),
        worst=min(sum(record.reward_local for record in records) for records in nodes),
        generated_groups=sum(record.local_groups for record in every),
        external_groups=sum(record.external_groups for record in every),
        tokens_generated=sum(record.tokens_generated for record in every),
        tokens_trained=sum(record.tokens_trained for record in every),
        refused=sum(record.gate_refused for record in every),
        threshold=statistics.median(thresholds) if thresholds else None,
        informative=statistics.fmean(r.informative_fraction * r.local_groups + r.external_groups for r in every),
        lag=rounds - min(sum(record.time <= first for record in records) for records in nodes),
        seconds=run.seconds,
        curve=curve,
    )


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
        self._notes = _Notes.read(case.directory)
        self._before = self._notes.seconds
        self._begun = time.monotonic()

    def run(self, stop: Stop) -> int:
        """Returns the exit status."""
        try:
            with (self._case.directory / "testnet.log").open("ab") as log:
                return _run(self._case.command(self._rounds), log, log, stop, self._look)
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


def _run(command: Sequence[str], stdout: IO[bytes], stderr: IO[bytes], stop: Stop, look: Callable[[bool], None]) -> int:
    """Run a process that `stop` ends and that never outlives this one. Returns its exit status.

    `look` is called every now and then, and with True when it is told to stop.
    """
    # What the caller's shell sets for a node of its own would change all of these.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SWARMNODE_")}
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        # A Ctrl-C at the terminal comes to this process, which hands it on once.
        start_new_session=True,
    )
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


@dataclass
class _Notes:
    """`bench.json` in the directory of a run: what it was begun with, and how long it has run."""

    begun_with: dict[str, Any]
    seconds: float = 0.0

    @classmethod
    def read(cls, directory: Path) -> "_Notes":
        """Empty notes where there are none. Raises RunError if they are damaged."""
        path = directory / "bench.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(dict(content["begun_with"]), float(content["seconds"]))
        except FileNotFoundError:
            return cls({})
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} is not what this benchmark writes: move {directory} away") from error

    def write(self, directory: Path) -> None:
        path = directory / "bench.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"begun_with": self.begun_with, "seconds": self.seconds}, indent=2) + "\n")
        part.replace(path)


def _prepare(case: Case) -> None:
    """The directory with `node.toml`. Raises RunError if it belongs to something else."""
    begun_with = {
        "nodes": case.nodes,
        "models": list(case.models),
        "engine": case.engine,
        "settings": json.loads(json.dumps(case.settings)),
    }
    notes = _Notes.read(case.directory)
    if notes.begun_with and notes.begun_with != begun_with:
        changed = ", ".join(sorted(key for key in begun_with if notes.begun_with.get(key) != begun_with[key]))
        raise RunError(f"{case.directory} was begun with other {changed}: go on with the same, or give another --out")
    if not notes.begun_with and case.directory.is_dir() and any(case.directory.iterdir()):
        raise RunError(f"{case.directory} holds something else: give another --out")
    case.directory.mkdir(parents=True, exist_ok=True)
    (case.directory / "node.toml").write_text(tomli_w.dumps(dict(case.settings)), encoding="utf-8")
    notes.begun_with = begun_with
    notes.write(case.directory)


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
                status = _run([*command, "--per-task", str(per_task)], file, file, stop, lambda stopping: None)
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
