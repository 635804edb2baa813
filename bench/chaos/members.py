"""A node as a process that is killed, stopped and started again, and what was seen of it meanwhile."""

import math
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.chaos.clock import write_offset
from bench.chaos.place import Place
from bench.chaos.plan import Kind
from bench.nodes import start
from node.datadir import DataDir
from node.snapshot import read_snapshot
from node.testnet.watch import Progress

_AGAIN_SECONDS = 2.0
"""Until a node that ended by itself is started again, as a service manager would."""

_EXCUSED_SECONDS = 30.0
"""How long after a fault of its disk a node may end because of it."""

_ROLES = {"rl.learner_child": "learner", "verifiers.worker": "worker"}

_SETTINGS = (
    "network.mdns=false",
    "network.dht=false",
    "network.upnp=false",
    # Rounds of the tiny model are short, and a node that starts on a busy machine lags behind them.
    "admission.queue=256",
    "node.threads=1",
)


@dataclass(frozen=True, slots=True)
class Exit:
    """A process of the node that ended. `why` says which fault excuses it; None: none does."""

    at: float
    status: int
    why: str | None


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one time: resident memory in bytes, open file descriptors.

    `rounds` are those that the node has finished since the process was first seen.
    """

    at: float
    role: str
    pid: int
    rounds: int
    rss: int
    files: int


class Member:
    """One node. Times are seconds of the run."""

    def __init__(self, number: int, others: Collection[int], place: Place, logs: Path, seed: int) -> None:
        self.number = number
        self.data = DataDir(place.data(number))
        self.log = logs / f"node-{number}.log"
        self.clock = logs / f"node-{number}.clock"
        write_offset(self.clock, 0.0)
        self.progress = Progress(self.data.path)
        self.exits: list[Exit] = []
        self.samples: list[Sample] = []
        self.rounds: list[tuple[float, int]] = []
        self.ills: set[Kind] = set()
        """Kinds of the faults that it has now."""
        self.banned = 0
        """Nodes that it bans in the end; all are honest."""
        self.starts = 0
        self._last_ill: dict[Kind, float] = {}
        self._gained_at_start = 0
        self._gained = 0
        self._seen: dict[int, int] = {}
        self._killed = False
        self._next: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [
            *(*place.before(number), sys.executable, "-m", "bench.chaos.clock", str(self.clock), "start"),
            *("--data-dir", str(self.data.path), "--model", "tiny", "--engine", "transformers", "--no-tty"),
            *("--seed", str(1000 * seed + number), "--listen", place.listen(number)),
            *(word for other in others for word in ("--join", place.listen(other))),
            # Every second node stops a little before the disk is full; the others run into it.
            *(word for text in (*_SETTINGS, _min_free(number)) for word in ("--set", text)),
        ]

    @property
    def running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None

    @property
    def done(self) -> int:
        """The last recorded round."""
        return self.progress.round

    def start(self) -> None:
        """Start the process. From the main thread, at whose end the kernel kills it."""
        self._next = None
        self._gained_at_start = self._gained
        self.starts += 1
        with self.log.open("ab") as log:
            self._process = start(self._command, log)

    def kill(self, start_at: float) -> None:
        """SIGKILL now, and a new start later."""
        self._killed = True
        self._next = start_at
        self.signal(signal.SIGKILL)

    def kill_learner(self) -> None:
        """SIGKILL for its learner, if there is one now."""
        for process, role in self._processes():
            if role == "learner":
                process.kill()

    def signal(self, number: int) -> None:
        """Send the node a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def look(self, now: float) -> None:
        """Take in what has happened, and start again what has ended."""
        self._last_ill.update(dict.fromkeys(self.ills, now))
        if self._process is not None and (status := self._process.poll()) is not None:
            self._process = None
            self.exits.append(Exit(now, status, self._excuse(now, status)))
            self._killed = False
            self._next = self._next or now + _AGAIN_SECONDS
        if self._process is None and self._next is not None and now >= self._next:
            self.start()
        before = self.done
        self.progress.read()
        # Rounds that are done again count twice: they are work.
        self._gained += max(0, self.done - before)
        self.rounds.append((now, self.done))

    def _excuse(self, now: float, status: int) -> str | None:
        if self._killed and status == -signal.SIGKILL:
            return "killed"
        since = {kind: now - at for kind, at in self._last_ill.items()}
        # Nothing can be written, so a node says so and ends, which takes a busy machine a while.
        if status == 1 and since.get("read-only", math.inf) < _EXCUSED_SECONDS:
            return "read-only"
        # One that trains has to wait for room; only one that starts may end.
        if status == 1 and since.get("full", math.inf) < _EXCUSED_SECONDS and self._gained == self._gained_at_start:
            return "full"
        return None

    def measure(self, now: float) -> None:
        """Note memory and files of its processes, stopped ones too."""
        for process, role in self._processes():
            try:
                with process.oneshot():
                    rounds = self._gained - self._seen.setdefault(process.pid, self._gained)
                    sample = Sample(now, role, process.pid, rounds, process.memory_info().rss, process.num_fds())
            except psutil.Error:
                continue
            self.samples.append(sample)

    def _processes(self) -> list[tuple[psutil.Process, str]]:
        if self._process is None:
            return []
        try:
            node = psutil.Process(self._process.pid)
            found = [(node, "node")]
            for child in node.children(recursive=True):
                words = child.cmdline()
                found += [(child, role) for module, role in _ROLES.items() if module in words]
        except psutil.Error:
            return []
        return found

    def tell_to_end(self) -> None:
        """SIGTERM, after a last look at what it thinks of others."""
        if self._process is not None:
            snapshot = read_snapshot(self.data.swarm_path, self._process.pid)
            self.banned = sum(row.banned_seconds > 0 for row in snapshot.peers) if snapshot is not None else 0
        self.signal(signal.SIGTERM)

    def wait(self, now: float, seconds: float) -> None:
        """Wait for the end of a node that was told to end. One that does not in time is killed."""
        if self._process is None:
            return
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._process = None
        self.exits.append(Exit(now, status, "told" if status == 0 else None))
        self.progress.read()

    def end(self) -> None:
        """End all of it at once, and wait until nothing is left."""
        processes = [process for process, _ in self._processes()]
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        # They go with the node.
        psutil.wait_procs(processes, timeout=10)

    def again(self) -> list[int]:
        """How many rounds each start has had to do again."""
        return [int(count) for count in re.findall(r"(\d+) rounds after round \d+ have no checkpoint", self._text())]

    def tracebacks(self) -> int:
        """How many the node has printed: errors that nobody had thought of."""
        return self._text().count("Traceback (most recent call last)")

    def _text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def _min_free(number: int) -> str:
    return f"storage.min_free_mb={8 * (number % 2)}"


def make_members(count: int, place: Place, logs: Path, seed: int) -> Sequence[Member]:
    """Nodes 1 to `count`, each of which knows the addresses of all others. None is started."""
    numbers = range(1, count + 1)
    return [Member(n, [other for other in numbers if other != n], place, logs, seed) for n in numbers]
