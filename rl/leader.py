"""Rank 0 of several: starts the others, tells them what to do, and notices when one of them is gone."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rl import errors
from rl.errors import LearnerError, ModelError, RankLost
from rl.models import ResolvedModel
from rl.ranks import Alone, Connected, Ranks
from rl.settings import LearnerSettings
from verifiers import launch

log = logging.getLogger(__name__)

FD_VARIABLE = "SWARMNODE_RANK_FD"

GRACE_SECONDS = 10.0
"""How long a call to the other ranks may go on after one of them has ended. gloo fails at once, nccl may wait for
ever; then the process ends, and the node starts another."""

EXIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a follower. `store` is the file where all ranks meet."""

    settings: LearnerSettings
    resolved: ResolvedModel
    store: Path
    threads: int


def open_ranks(settings: LearnerSettings, resolved: ResolvedModel) -> Ranks:
    """Start what `training.ranks` asks for; the followers load their model while this process loads its own.

    Raises ModelError if the machine cannot serve so many, OSError if a process cannot be started.
    """
    size = settings.training.ranks
    if size == 1:
        return Alone()
    if resolved.device not in ("cpu", "cuda"):
        raise ModelError(f"training.ranks is {size}: on {resolved.device} it can only be 1")
    if resolved.device == "cuda" and torch.cuda.device_count() < size:
        raise ModelError(f"training.ranks is {size} and this machine has {torch.cuda.device_count()} GPUs: lower it")
    return Leading(settings, resolved)


class Leading(Connected):
    """See the module. Not to be used before `join`."""

    def __init__(self, settings: LearnerSettings, resolved: ResolvedModel) -> None:
        size = settings.training.ranks
        super().__init__(0, size, resolved.device, max(1, torch.get_num_threads() // size), settings.engine.patience)
        self._number = 0
        self._lost: str | None = None
        self._closing = False
        self._directory = Path(tempfile.mkdtemp(prefix="swarmnode-ranks-"))
        self._start = Start(settings, resolved, self._directory / "store", self.threads)
        self._followers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        try:
            for rank in range(1, size):
                process, connection = _spawn(rank, size, self.threads)
                self._followers.append((process, connection))
                watch = threading.Thread(target=self._watch, args=(rank, process), daemon=True, name=f"rank-{rank}")
                watch.start()
                self._send(rank, connection, self._start)
        except (OSError, RankLost):
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the followers, in order."""
        return [process.pid for process, _ in self._followers]

    def join(self) -> None:
        """Wait until all have their model. Raises what kept one of them from it, or RankLost."""
        for rank, (_, connection) in enumerate(self._followers, start=1):
            try:
                failure: tuple[str, str] | None = connection.recv()
            except (EOFError, ConnectionError) as error:
                raise RankLost(self._lost or f"rank {rank} of this learner ended while it started") from error
            if failure is not None:
                kind: type[LearnerError] = getattr(errors, failure[0])
                raise kind(f"{failure[1]} (rank {rank})")
        self.connect(self._start.store)
        if self._start.resolved.device == "cpu":
            # All have met. nccl may look there again.
            shutil.rmtree(self._directory, ignore_errors=True)

    def tell(self, operation: str, **payload: Any) -> None:
        """See Ranks. Raises RankLost."""
        if self._lost is not None or self._closing:
            raise RankLost(self._lost or "the ranks of this learner are closed")
        self._number += 1
        self.begin(self._number)
        self._send_all(operation, payload)

    def hurry(self) -> None:
        """See Ranks."""
        self._send_all("hurry", {})

    def close(self) -> None:
        """End the followers. May be called twice."""
        self._closing = True
        for _, connection in self._followers:
            connection.close()
        deadline = time.monotonic() + EXIT_SECONDS
        for process, _ in self._followers:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _send_all(self, operation: str, payload: dict[str, Any]) -> None:
        for rank, (_, connection) in enumerate(self._followers, start=1):
            self._send(rank, connection, (self._number, operation, payload))

    def _send(self, rank: int, connection: Connection, message: Any) -> None:
        try:
            connection.send(message)
        except OSError as error:
            raise RankLost(self._lost or f"rank {rank} of this learner is gone") from error

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """A thread of its own for each follower: waits for its end, which must not come before ours."""
        status = process.wait()
        if self._closing:
            return
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self._lost = f"rank {rank} of this learner {how}"
        log.error("%s: its learner has to start anew", self._lost)
        call, since = self.calls, time.monotonic()
        while not self._closing:
            if not self.busy or self.calls != call:
                # It may be about to make the call that never returns.
                call, since = self.calls, time.monotonic()
            elif time.monotonic() - since > GRACE_SECONDS:
                log.critical("the other ranks wait for it in vain: the learner ends")
                os._exit(1)
            time.sleep(0.1)


def _spawn(rank: int, size: int, threads: int) -> tuple[subprocess.Popen[bytes], Connection]:
    """A follower in this process's own group, which ends with the thread that starts it."""
    ours, theirs = socket.socketpair()
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": str(threads),
        FD_VARIABLE: str(theirs.fileno()),
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), sys.executable, "-m", "rl.rank_child"],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, Connection(ours.detach())
