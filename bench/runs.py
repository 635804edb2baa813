"""Runs of real nodes that are to be compared: what `bench.testnet` and `bench.language` share.

A run is `swarmnode testnet` in a directory of its own. What came out is read from the `metrics.jsonl` of its nodes
alone, so a run may be interrupted at any time and gone on with by the same command. Runs are compared over the rounds
that all nodes of all of them have done: the same number of updates.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node.datadir import DataDir
from node.record import MetricsFile, Record
from rl.selection import STRATEGIES


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
    return Run(case, nodes, Notes.read(case.directory).seconds)


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


@dataclass
class Notes:
    """`bench.json` in the directory of a run: what it was begun with, and how long it has run."""

    begun_with: dict[str, Any]
    seconds: float = 0.0

    @classmethod
    def read(cls, directory: Path) -> "Notes":
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
