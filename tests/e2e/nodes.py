"""Whole nodes: real processes, real signals, the model that ships with the project."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.datadir import DataDir
from node.identity import Identity
from node.snapshot import Snapshot, read_snapshot

# Small rounds, so that a test of supervision does not wait for learning.
QUICK = (
    *("--set", "sharing.local=2", "--set", "sharing.external=0", "--set", "sharing.alone=2"),
    *("--set", "sampling.group_size=4", "--set", "storage.min_free_mb=0"),
)


# A networked node that meets only those whose addresses it is given, and keeps all that comes.
SWARM = (
    *("--set", "network.mdns=false", "--set", "network.dht=false", "--set", "network.upnp=false"),
    *("--set", "storage.min_free_mb=0", "--set", "pool.max_groups=1000000", "--set", "pool.per_peer=1000000"),
    # On a busy machine a node that has just started lags behind rounds as short as the tiny model's.
    *("--set", "admission.queue=256"),
)


class RunningNode:
    """One `swarmnode start` and its data directory. `before` are words in front of the command line."""

    def __init__(
        self,
        data_dir: Path,
        arguments: tuple[str, ...],
        log: Path,
        model: str,
        env: dict[str, str],
        before: tuple[str, ...] = (),
    ) -> None:
        self.data_dir = data_dir
        self.log_path = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    *(*before, sys.executable, "-m", "node.cli", "start", "--data-dir", str(data_dir)),
                    *("--model", model, "--no-tty", *arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={name: value for name, value in os.environ.items() if not name.startswith("SWARMNODE_")} | env,
            )
        self._started = psutil.Process(self.process.pid)

    def records(self) -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl."""
        path = self.data_dir / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def rounds(self) -> list[int]:
        """Numbers of the rounds in metrics.jsonl, as they stand there."""
        return [record["round"] for record in self.records()]

    def log(self) -> str:
        """What all nodes of this data directory have printed."""
        return self.log_path.read_text(errors="replace")

    def wait(self, seconds: float = 240) -> int:
        """Exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the node still runs after {seconds} s\n{self.log()[-4000:]}")

    def wait_until(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        """Poll until `condition()` holds while the node runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                pytest.fail(f"the node ended with status {self.process.returncode}\n{self.log()[-4000:]}")
            if time.monotonic() > deadline:
                pytest.fail(f"waited {seconds} s in vain\n{self.log()[-4000:]}")
            time.sleep(0.02)

    def wait_for_round(self, number: int) -> None:
        """Until round `number` stands in metrics.jsonl."""
        self.wait_until(lambda: number in self.rounds())

    def snapshot(self) -> Snapshot | None:
        """What the node says of its swarm; None while it has not said anything."""
        return read_snapshot(DataDir(self.data_dir).swarm_path, self.process.pid)

    def is_connected(self, count: int = 1) -> bool:
        """Whether at least so many other nodes are."""
        snapshot = self.snapshot()
        return snapshot is not None and snapshot.connected >= count

    def address(self) -> str:
        """Where other nodes reach it, once it is known."""
        self.wait_until(lambda: (snapshot := self.snapshot()) is not None and bool(snapshot.addresses))
        snapshot = self.snapshot()
        assert snapshot is not None
        return snapshot.addresses[0]

    def groups_of(self, origin: "RunningNode") -> dict[bytes, int]:
        """The groups of a node in this one's pool: what they are, and the round in which they came here."""
        path = DataDir(self.data_dir).pool_path
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as pool:
            rows = pool.execute("SELECT digest, round FROM groups WHERE origin = ?", (origin.node_id,))
            return dict(rows.fetchall())

    @property
    def node_id(self) -> str:
        """The node's peer id."""
        return Identity.load(DataDir(self.data_dir).identity_path).node_id

    def children(self, module: str = "") -> list[psutil.Process]:
        """The node's child processes that run `python -m module...`."""
        return [child for child in self._started.children(recursive=True) if module in command_line(child)]

    def kill(self) -> None:
        """SIGKILL, as the out-of-memory killer would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


def command_line(process: psutil.Process) -> str:
    """What a process was started as; nothing for one that has ended since it was listed."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


StartNode = Callable[..., RunningNode]


def wait_for(condition: Callable[[], bool], seconds: float, what: str = "") -> float:
    """Poll until `condition()` holds; returns after how many seconds it did."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            pytest.fail(f"waited {seconds} s in vain {what}")
        time.sleep(0.05)
    return time.monotonic() - begun


def wait_for_growth(count: Callable[[], int], goal: float, seconds: float, what: str = "") -> None:
    """Poll until `count()` is `goal`, for as long as it has grown within the last `seconds`."""
    best, grown = -1, time.monotonic()
    while (now := count()) < goal:
        if now > best:
            best, grown = now, time.monotonic()
        elif time.monotonic() - grown > seconds:
            pytest.fail(f"{now} of {goal:.0f} for {seconds} s {what}")
        time.sleep(0.1)
