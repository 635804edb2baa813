"""What does a swarm make of faults? `python -m bench.chaos [--nodes 8] [--minutes 20] [--seed 1] [--json FILE]`.

Real nodes of the tiny model, as processes, are killed (SIGKILL, their learners too), stopped (SIGSTOP) and started
again, cut apart, given slow links, full disks, data directories that cannot be written and clocks that are wrong by an
hour, at random times that follow from the seed. In the end all is healed, the nodes get time to go on, and are stopped;
then their records, checkpoints and pools are read, and what their processes took is looked at. The exit status is 1 if
anything is wrong; the data directories of those nodes are then kept in `--out`, where the logs are too.

On Linux each node has a network and a disk of its own, made in namespaces that only this run sees (as root, or where
the system lets users make them); elsewhere all are on loopback, and the faults of networks and disks are left out.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console

from bench.chaos import report
from bench.chaos.checks import PROGRESS, exchanged, problems_of_files, problems_of_growth, problems_of_life
from bench.chaos.members import Member, make_members
from bench.chaos.place import Loopback, Place, Spaces, enter
from bench.chaos.plan import Fault, draw
from bench.chaos.world import World
from bench.driving import Stop, say
from bench.runs import RunError

_LOAD_SECONDS = 900.0
"""Eight nodes load in half a minute on two free cores, and in minutes on busy ones."""
_SETTLE_SECONDS = 180.0
"""Within which each node must have gone on after the last fault was healed."""
_END_SECONDS = 90.0
_LOOK_SECONDS = 0.25
_MEASURE_SECONDS = 2.0
_SAY_SECONDS = 30.0
_QUIET_SHARE = 0.2
"""Of the time, for what comes after the last fault."""


class Chaos:
    """One run."""

    def __init__(self, place: Place, members: Sequence[Member], stop: Stop) -> None:
        self._members = members
        self._stop = stop
        self.world = World(place, members)
        self._begun = time.monotonic()
        self._measured = self._said = 0.0
        self.healed_at: dict[int, int] = {}
        self.ended = 0.0

    @property
    def now(self) -> float:
        """Seconds since all nodes had begun to train."""
        return time.monotonic() - self._begun

    def run(self, faults: Sequence[Fault], seconds: float) -> None:
        """All of it, or until it is told to stop. Raises RunError if the nodes do not even begin."""
        for member in self._members:
            member.start()
        self._wait(_LOAD_SECONDS, lambda: all(member.done > 0 for member in self._members))
        if not all(member.done > 0 for member in self._members) and not self._stop.count:
            raise RunError(f"a node has not finished a round after {_LOAD_SECONDS:.0f} s: see {self._members[0].log}")
        self._begun = time.monotonic()
        self._measured = self._said = 0.0
        for member in self._members:
            member.rounds.clear()
            member.samples.clear()
        for fault in faults:
            while self.now < fault.at and not self._stop.count:
                self._look()
            if self._stop.count:
                return
            say(f"{self.now:.0f} s: {fault.kind} {fault.nodes} for {fault.seconds:.0f} s")
            self.world.begin(fault)
        last = max((fault.end for fault in faults), default=0.0)
        while self.now < last and not self._stop.count:
            self._look()
        self._settle(seconds)

    def _settle(self, seconds: float) -> None:
        self.world.heal()
        self.healed_at = {member.number: member.done for member in self._members}
        say(f"{self.now:.0f} s: all faults are healed")
        self._wait(max(0.0, seconds - self.now), lambda: False)
        self._wait(_SETTLE_SECONDS, self._has_gone_on)
        self.ended = self.now
        for member in self._members:
            member.tell_to_end()
        for member in self._members:
            member.wait(self.now, _END_SECONDS)

    def _has_gone_on(self) -> bool:
        return all(
            member.done >= self.healed_at[member.number] + PROGRESS and exchanged(member, self.healed_at[member.number])
            for member in self._members
        )

    def _wait(self, seconds: float, condition: Callable[[], bool]) -> None:
        until = self.now + seconds
        while self.now < until and not self._stop.count and not condition():
            self._look()

    def _look(self) -> None:
        time.sleep(_LOOK_SECONDS)
        self.world.look(self.now)
        for member in self._members:
            member.look(self.now)
        if self.now >= self._measured + _MEASURE_SECONDS:
            self._measured = self.now
            for member in self._members:
                member.measure(self.now)
        if self.now >= self._said + _SAY_SECONDS:
            self._said = self.now
            rounds = " ".join(str(member.done) for member in self._members)
            say(f"{self.now:.0f} s: rounds {rounds}")

    def end(self) -> None:
        """Leave nothing behind."""
        self.world.heal()
        for member in self._members:
            member.end()


def open_place(arguments: argparse.Namespace) -> Place:
    """Networks and disks for the nodes, or what can be had."""
    if arguments.inside:
        return Spaces(arguments.work, arguments.nodes)
    say("this system gives no namespaces: no partitions, slow links, full or read-only disks")
    return Loopback(arguments.work, arguments.nodes)


def measure(arguments: argparse.Namespace, place: Place, stop: Stop) -> int:
    """Run, check, tell. Returns the exit status."""
    members = make_members(arguments.nodes, place, arguments.out, arguments.seed)
    seconds = 60.0 * arguments.minutes
    chaos = Chaos(place, members, stop)
    try:
        chaos.run(draw(arguments.seed, arguments.nodes, (1 - _QUIET_SHARE) * seconds, place.kinds), seconds)
    finally:
        chaos.end()
    if stop.count:
        return 128 + signal.SIGINT
    rows = []
    for member in members:
        healed_at, half = chaos.healed_at[member.number], chaos.ended / 2
        problems = [
            *problems_of_life(member, healed_at),
            *problems_of_files(member.data, member.done),
            *problems_of_growth(member.samples, half),
        ]
        rows.append(report.figures(member, healed_at, half, problems))
        if problems:
            shutil.copytree(member.data.path, arguments.out / f"node-{member.number}", dirs_exist_ok=True)
    report.show(rows, chaos.world.done, Console(width=200))
    report.draw(members, chaos.world.done, arguments.plot or arguments.out / "chaos.png")
    if arguments.json:
        report.write_json(rows, chaos.world.done, arguments.json)
    return 1 if any(row["problems"] for row in rows) else 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments; ends the process with a message for those that cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=20.0, help="from when all nodes train")
    parser.add_argument("--seed", type=int, default=1, help="of the faults, and of what the nodes sample")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="default: chaos.png in --out")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), metavar="DIR", help="logs, and what went wrong")
    parser.add_argument("--smoke", action="store_true", help="3 nodes, 2 minutes")
    # Said by the process that has made the namespaces to the one that runs in them.
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.smoke:
        arguments.nodes, arguments.minutes = 3, 2.0
    if not 2 <= arguments.nodes <= 250 or arguments.minutes <= 0:
        parser.error("--nodes must be from 2 to 250, and --minutes more than 0")
    return arguments


def main() -> None:
    """Enter namespaces if there can be any, and run there."""
    words = sys.argv[1:]
    arguments = parse(words)
    if not arguments.inside:
        enter([*words, "--inside"])
    arguments.out = arguments.out.absolute()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for left in arguments.out.iterdir():
        if left.name.startswith("node-"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    with tempfile.TemporaryDirectory(prefix="swarmnode-chaos-") as work, Stop() as stop:
        arguments.work = Path(work)
        with closing(open_place(arguments)) as place:
            try:
                status = measure(arguments, place, stop)
            except RunError as error:
                say(f"error: {error}")
                status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
