"""What a running node says of its swarm, once a second: `swarm.json` in its data directory.

`swarmnode status`, `peers` and `id` read it; there is no socket to ask. It is small, replaced as a whole and never
forced to disk: after a crash it is worth nothing, and nobody may wait for it. `node.heartbeat` writes it.
"""

import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

STALE_SECONDS = 10.0
"""A snapshot older than this says how things were, not how they are: its node stands still, or cannot write."""


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
