"""A follower: `python -m rl.rank_child`, started by rank 0 of a learner (`rl.leader`) with a socket to it.

It holds the same policy and does what rank 0 tells it, until that closes the socket or ends. It leaves signals to rank
0, which is the one that can save, and logs to the same stderr.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from rl.batches import Group
from rl.errors import LearnerError, RankLost
from rl.gate import Gate
from rl.leader import FD_VARIABLE, Start
from rl.logs import log_to_stderr, silence_libraries
from rl.policy import Policy
from rl.ranks import Following, together
from rl.saved import read_policy, set_policy

log = logging.getLogger(__name__)


class Follower:
    """The operations of a rank that follows. Each is what rank 0 does at the same time."""

    def __init__(self, start: Start, ranks: Following) -> None:
        """Raises ModelError, OutOfMemory."""
        self._ranks = ranks
        self._lora = start.settings.lora
        self.policy = Policy(start.resolved, start.settings, ranks)

    def update(self, groups: Sequence[Group], seed: int, gate: Gate | None, token_budget: int) -> None:
        """A learning step, or several."""
        self.policy.token_budget = token_budget
        self.policy.update(groups, seed, gate=gate, stop=self._ranks.hurried)

    def load(self, directory: Path) -> None:
        """Take policy and optimiser from a directory."""
        saved = together(self._ranks, lambda: read_policy(self.policy, self._lora, directory))
        set_policy(self.policy, saved)

    def serve(self) -> None:
        """Follow until rank 0 closes or is gone."""
        operations: dict[str, Callable[..., None]] = {"update": self.update, "load": self.load}
        while True:
            try:
                operation, payload = self._ranks.receive()
            except EOFError:
                return
            try:
                operations[operation](**payload)
            except LearnerError as error:
                # All ranks have agreed on it, and rank 0 says it.
                log.debug("%s: %s", operation, error)


def _end_with(parent: int) -> None:
    """For systems whose kernel does not see to it, as `verifiers.launch` has it do on Linux."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> int:
    """Follow one rank 0. Returns the exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if sys.platform != "linux":
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True, name="watch-parent").start()
    log_to_stderr(f"rank {rank}: ")
    silence_libraries()
    connection = Connection(int(os.environ.pop(FD_VARIABLE)))
    try:
        start: Start = connection.recv()
    except EOFError:
        return 0
    torch.set_num_threads(start.threads)
    if start.resolved.device == "cuda":
        torch.cuda.set_device(rank)
    patience = start.settings.engine.patience
    ranks = Following(connection, rank, size, start.resolved.device, start.threads, patience)
    try:
        follower = Follower(start, ranks)
    except LearnerError as error:
        connection.send((type(error).__name__, str(error)))
        return 1
    try:
        connection.send(None)
        ranks.connect(start.store)
        follower.serve()
    except (RankLost, OSError, EOFError) as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
