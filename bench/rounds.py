"""Where does the time of a round go? `python -m bench.rounds [--models tiny auto] [--engines transformers vllm]`.

Real nodes, by the product's settings: one alone (`silo`), and two that share. Milliseconds a round, means over the
rounds after the first few of all nodes: the parts of a round from the node's log, where each is told as it begins;
sampling and the learning step from its record. `between` is what is left of the wall-clock time from one round to the
next: record, checkpoint, view. `overhead` is what the clock shows beyond `generate` and `update`, in parts of both.
`--set training.overlap=true` measures rounds that overlap: `waited` is what is then still waited for sampling.
"""

import argparse
import json
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from bench.nodes import ISOLATED, NodeFailed, failed, running
from node.record import MetricsFile, Record
from node.snapshot import Snapshot

PARTS = ("draw", "generate", "score", "share", "mix", "update")
ROUNDS = {"tiny": 100}
"""So many of other models."""
OTHERS = 12
WARM = 5
"""Rounds that do not count: the first are slower, and in a swarm have nothing of others yet."""

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Case:
    """What runs. `settings` are words of `--set`. Without `silo` a single node is in a swarm, too; `floods` is how many
    others pour out rollouts to it (`bench.flood`).
    """

    model: str
    engine: str
    nodes: int
    rounds: int
    settings: tuple[str, ...] = ()
    silo: bool = True
    floods: int = 0

    @property
    def name(self) -> str:
        """As the table has it."""
        who = "silo" if self.silo else "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        words = [self.model, self.engine, who, *self.settings]
        return ", ".join([*words, f"{self.floods} that flood"] if self.floods else words)


@dataclass(frozen=True)
class Shares:
    """Means over the rounds of all nodes of a case, in seconds. `external` are groups of others a round, `received`
    batches a second."""

    rounds: int
    wall: float
    parts: Mapping[str, float]
    between: float
    external: float
    received: float
    reward: float

    @property
    def overhead(self) -> float:
        """What the clock shows beyond sampling and learning, in parts of both; below 0 where more overlaps."""
        work = self.parts["generate"] + self.parts["update"]
        return (self.wall - work) / work

    def row(self, name: str) -> str:
        """A line of the table, in milliseconds."""
        parts = " | ".join(f"{1000 * self.parts[part]:.1f}" for part in [*PARTS, "waited"])
        return (
            f"| {name} | {self.rounds} | {1000 * self.wall:.1f} | {parts} | {1000 * self.between:.1f} | "
            f"{self.received:.1f} | {self.external:.1f} | {self.overhead:.1%} |"
        )


def phases(log: Path) -> list[tuple[str, float]]:
    """What began, and when in seconds since 1970, by the JSON lines of a node's log."""
    found = []
    for line in log.read_text(encoding="utf-8").splitlines():
        if '"event": "phase"' in line:
            said = json.loads(line)
            found.append((said["name"], datetime.fromisoformat(said["timestamp"]).timestamp()))
    return found


Timed = tuple[Record, dict[str, float]]
"""A round, and the seconds of its parts and of its `wall`."""


def shares(records: Sequence[Record], told: Sequence[tuple[str, float]], warm: int) -> list[Timed]:
    """Each round after the first `warm`, but the last, from when its scoring begins to when that of the next does.

    What is done ahead is not told as a part. Sampling, that of the next round, and the learning step are as recorded:
    with overlap the first goes by during other parts, and `waited` is what is waited for it.
    """
    begins = [place for place, (name, _) in enumerate(told) if name == "score"]
    found = []
    for record, following, here, there in zip(records, records[1:], begins, begins[1:], strict=False):
        if record.round <= warm:
            continue
        seconds = dict.fromkeys([*PARTS, "waited"], 0.0) | {"wall": told[there][1] - told[here][1]}
        for (name, begun), (_, ended) in zip(told[here:there], told[here + 1 : there + 1], strict=True):
            place = "waited" if name == "generate" else name
            if place in seconds:
                seconds[place] += ended - begun
        # The log tells when something else begins, so what comes after the step would count as a part of it.
        recorded = {"generate": following.seconds_generate, "update": record.seconds_update}
        found.append((record, seconds | recorded))
    return found


def mean_shares(rounds: Sequence[Timed]) -> Shares:
    """Raises ValueError for no rounds."""
    parts = {part: statistics.fmean(seconds[part] for _, seconds in rounds) for part in [*PARTS, "waited"]}
    wall = statistics.fmean(seconds["wall"] for _, seconds in rounds)
    return Shares(
        rounds=len(rounds),
        wall=wall,
        parts=parts,
        between=wall - sum(seconds for part, seconds in parts.items() if part != "generate"),
        external=statistics.fmean(record.external_groups for record, _ in rounds),
        received=statistics.fmean(record.batches_received for record, _ in rounds) / wall,
        reward=statistics.fmean(record.reward_local for record, _ in rounds),
    )


def measure(case: Case, directory: Path, limit: float) -> Shares:
    """Run a case in a directory of its own, for `limit` seconds at most. Raises NodeFailed."""
    words = ["start", "--model", case.model, "--engine", case.engine, "--log-json", "--seed", "7", *ISOLATED]
    words += ["--set", "log.level=debug", "--set", "api.dashboard=false"]
    words += [word for setting in case.settings for word in ("--set", setting)]
    directory.mkdir(parents=True)
    places = [directory / f"node-{number}" for number in range(1, case.nodes + 1)]
    records = {place: MetricsFile(place / "metrics.jsonl") for place in places}
    deadline = time.monotonic() + limit
    with ExitStack() as stack:
        nodes = []
        for place in places:
            more = ["--silo"] if case.silo else ["--listen", "/ip4/127.0.0.1/tcp/0"]
            more += [] if place == places[0] else ["--join", _address(places[0], deadline)]
            asked = [*words, *more, "--data-dir", str(place)]
            nodes.append((asked, place, stack.enter_context(running(asked, place.with_suffix(".log")))))
        for number in range(case.floods):
            stranger = [_address(places[0], deadline)]
            stack.enter_context(running(stranger, directory / f"flood-{number}.log", "bench.flood"))
        while any(not (last := records[place].last(1)) or last[0].round <= case.rounds for place in places):
            for asked, place, process in nodes:
                if process.poll() is not None:
                    raise failed(asked, place.with_suffix(".log"), f"ended with status {process.returncode}")
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        for _, _, process in nodes:
            process.send_signal(signal.SIGTERM)
        for _, _, process in nodes:
            process.wait(120)
    found = [shares(list(records[p].read()), phases(p.with_suffix(".log")), WARM) for p in places]
    if not all(found):
        raise NodeFailed(f"{case.name}: no more than {WARM} rounds within {limit:g} s")
    return mean_shares([each for rounds in found for each in rounds])


def _address(place: Path, deadline: float) -> str:
    """Where the first node is reached, once it says so."""
    while time.monotonic() < deadline:
        try:
            snapshot = Snapshot.model_validate_json((place / "swarm.json").read_bytes())
        except (OSError, ValueError):
            snapshot = None
        if snapshot is not None and snapshot.addresses:
            return snapshot.addresses[0]
        time.sleep(_POLL_SECONDS)
    raise NodeFailed(f"the node in {place} listens nowhere")


def table(found: Mapping[str, Shares]) -> str:
    """Markdown, in milliseconds."""
    names = ["node", "rounds", "wall", *PARTS, "waited", "between", "batches/s", "external", "overhead"]
    head = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    return "\n".join([*head, *(each.row(name) for name, each in found.items())])


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "auto"], help="as [model] name")
    parser.add_argument("--engines", nargs="+", choices=["transformers", "vllm"], default=["transformers"])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2], help="in a swarm; 1 trains alone")
    parser.add_argument("--rounds", type=int, help=f"unless given {ROUNDS['tiny']} of tiny, {OTHERS} of others")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all nodes")
    parser.add_argument(
        "--flood", type=int, nargs="+", default=[], metavar="N", help="instead: one node, N strangers that flood it"
    )
    parser.add_argument("--limit", type=float, default=240.0, help="seconds that one case may take")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--smoke", action="store_true", help="a few rounds of tiny alone, in ten seconds")
    arguments = parser.parse_args()
    cases = [
        Case(model, engine, nodes, arguments.rounds or ROUNDS.get(model, OTHERS), tuple(arguments.set), nodes == 1)
        for model in arguments.models
        for engine in arguments.engines
        for nodes in arguments.nodes
    ]
    if arguments.flood:
        kinds = dict.fromkeys(replace(case, nodes=1, silo=False) for case in cases)
        cases = [replace(case, floods=floods) for case in kinds for floods in arguments.flood]
    if arguments.smoke:
        cases = [Case("tiny", "transformers", 1, WARM + 5, tuple(arguments.set))]
    found: dict[str, Shares] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as directory:
            for case in cases:
                found[case.name] = measure(case, Path(directory) / re.sub(r"\W", "-", case.name), arguments.limit)
                print(found[case.name].row(case.name), file=sys.stderr, flush=True)
    except NodeFailed as error:
        sys.exit(f"error: {error}")
    print(table(found))
    if arguments.json:
        written = {name: {**asdict(each), "overhead": each.overhead} for name, each in found.items()}
        arguments.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
