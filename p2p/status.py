"""What there is to see of the swarm, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass

from p2p.contribution import Told


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One other node: `score` is its reputation (0 at first, below for offences), `groups` those admitted, `batches`
    those taken in. Of this node's own groups it says that it admitted `ours_admitted` and trained on `ours_trained`."""

    peer: str
    address: str | None
    connected: bool
    in_mesh: bool
    score: float
    banned_seconds: float
    batches: int
    groups: int
    rejected: Mapping[str, int]
    ours_admitted: int
    ours_trained: int


@dataclass(frozen=True, slots=True)
class SwarmStatus:
    """The swarm as this node sees it, with counts since its start (`contribution`: since it has its identity).

    `sent`, `received` and `recovered` (of those, by catch-up) are batches; `groups` came in them, and `admitted` of
    these were good. `waiting` batches are still to be checked, `unsent` ones are in the outbox, `held` ones are kept
    for those who missed them.
    """

    swarm: str
    peer_id: str
    addresses: tuple[str, ...]
    connected: int
    mesh: int
    sent: int
    received: int
    recovered: int
    groups: int
    admitted: int
    duplicates: int
    rejected: Mapping[str, int]
    waiting: int
    unsent: int
    held: int
    contribution: Told
    peers: tuple[PeerRow, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the start, which never fall, for differences between two moments; `peers` are connected now."""

    peers: int
    batches_sent: int
    batches_received: int
    groups_admitted: int
    rejected: Mapping[str, int]
