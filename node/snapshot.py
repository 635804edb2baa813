"""What a running node says of its swarm, once a second: `swarm.json` in its data directory.

`swarmnode status`, `peers` and `id` read it; there is no socket to ask. It is small, replaced as a whole and never
forced to disk: after a crash it is worth nothing, and nobody may wait for it.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import trio
from pydantic import BaseModel, ConfigDict, ValidationError

SECONDS = 1.0
"""Between two snapshots."""

STALE_SECONDS = 10.0
"""A snapshot older than this says how things were, not how they are: its node stands still, or cannot write."""

BEAT_SECONDS = 0.02
LAG_SECONDS = 60.0
"""What the measured lag looks back."""


class _Model(BaseModel):
    # Another version may have written the file.
    model_config = ConfigDict(extra="ignore", frozen=True)


class Lag(_Model):
    """How much later than planned the event loop got round to a task, in ms, over the last minute."""

    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class PeerRow(_Model):
    """One other node. `score` is its reputation, 0 at first and below for offences; `groups` were admitted.

    Of this node's groups it says that it admitted `ours_admitted` and trained on `ours_trained`, over all restarts.
    """

    peer: str
    address: str | None = None
    connected: bool = False
    in_mesh: bool = False
    score: float = 0.0
    banned_seconds: float = 0.0
    batches: int = 0
    groups: int = 0
    rejected: dict[str, int] = {}
    ours_admitted: int = 0
    ours_trained: int = 0


class Contribution(_Model):
    """What became of the `sent` groups of this node, as others say: how often a node admitted one, or trained on it,
    and how many nodes say so. A group counts once for each node. Over all restarts.
    """

    sent: int = 0
    admitted: int = 0
    admitted_by: int = 0
    trained: int = 0
    trained_by: int = 0


class Snapshot(_Model):
    """The swarm as this node sees it at `time` (seconds since 1970). Counts are since its start.

    `addresses` are those under which it may be reached, each with its peer id. `sent`, `received` and `recovered` (by
    catch-up) are batches; `groups` came in them, and `admitted` of these were good. `reachable` says whether others
    anywhere can dial it: yes, no or unknown.
    """

    time: float
    pid: int
    swarm: str
    peer_id: str
    addresses: list[str] = []
    reachable: str = "unknown"
    reachable_why: str = ""
    connected: int = 0
    mesh: int = 0
    sent: int = 0
    received: int = 0
    recovered: int = 0
    groups: int = 0
    admitted: int = 0
    duplicates: int = 0
    waiting: int = 0
    unsent: int = 0
    held: int = 0
    rejected: dict[str, int] = {}
    contribution: Contribution = Contribution()
    lag_ms: Lag = Lag()
    peers: list[PeerRow] = []

    @property
    def age(self) -> float:
        """Seconds since it was taken."""
        return max(0.0, time.time() - self.time)


def read_snapshot(path: Path, pid: int | None) -> Snapshot | None:
    """The snapshot of the node with that process id; None if there is none of it, or it cannot be read."""
    if pid is None:
        return None
    try:
        snapshot = Snapshot.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
    # A process id of 0: the lock's holder has not written it yet.
    return snapshot if snapshot.pid == pid else None


class Beat:
    """Measures the lag of the event loop it runs on."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque()

    async def run(self) -> NoReturn:
        """Sleep, and note by how much the sleep was too long."""
        while True:
            due = trio.current_time() + BEAT_SECONDS
            await trio.sleep_until(due)
            self._note(trio.current_time(), due)

    def _note(self, now: float, due: float) -> None:
        self._late.append((now, now - due))
        while self._late[0][0] < now - LAG_SECONDS:
            self._late.popleft()

    def lag(self) -> Lag:
        """Over the last minute."""
        late = sorted(1000 * seconds for _, seconds in self._late)
        if not late:
            return Lag()
        p50, p99 = (late[min(len(late) - 1, int(share * len(late)))] for share in (0.5, 0.99))
        return Lag(p50=round(p50, 2), p99=round(p99, 2), max=round(late[-1], 2))


class SnapshotFile:
    """`swarm.json`, written by the node that holds the data directory."""

    def __init__(self, path: Path, say: Callable[[str, str], None]) -> None:
        self._path = path
        self._new = path.with_name(f".{path.name}.new")
        self._say = say
        self._complained = False

    async def write(self, snapshot: Snapshot) -> None:
        """Replace the file. A disk that does not take it is a warning, once; the node does not need the file."""
        data = snapshot.model_dump_json().encode() + b"\n"
        try:
            # A rename waits where another file is being forced to disk, as checkpoints are.
            await trio.to_thread.run_sync(self._replace, data)
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._say(
                    "warning",
                    f"{self._path} cannot be written ({error.strerror or error}): training goes on, and `swarmnode"
                    " status` does not see the swarm meanwhile",
                )

    def remove(self) -> None:
        """At the node's end; best effort, since the file of an ended node is passed over anyway."""
        for path in (self._path, self._new):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                return

    def _replace(self, data: bytes) -> None:
        self._new.write_bytes(data)
        os.replace(self._new, self._path)
