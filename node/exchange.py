"""What the rounds of a node and its network have in common: the pool, the number of the round, and what has come in."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from node.disk import Disk
from rl.pool import SqlitePool
from rl.protocols import Swarm
from rl.rollouts import ScoredGroup
from rl.selection import Candidate


class Totals(Protocol):
    """What a network has counted since it was opened: batches that came, and what was refused, by reason.

    `peers` are the nodes connected now.
    """

    @property
    def peers(self) -> int: ...
    @property
    def batches_received(self) -> int: ...
    @property
    def rejected(self) -> Mapping[str, int]: ...


class Network(Swarm, Protocol):
    """The swarm as the rounds know it."""

    def totals(self) -> Totals:
        """Counts up to now; they never fall."""
        ...

    async def deliver(self, groups: Sequence[ScoredGroup], number: int, /) -> None:
        """Send these groups once somebody is there to hear them, and return when they have gone out."""
        ...

    def trained(self, groups: Mapping[str, int]) -> None:
        """So many groups of each node were trained on for the first time; they are told."""
        ...

    async def wait_for_peers(self, count: int, seconds: float) -> int:
        """Say that this node is ready to begin; until so many others are, or the time is over. Returns how many are."""
        ...


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals as plain values."""

    peers: int = 0
    batches_received: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, totals: Totals) -> "Counts":
        """A copy, which does not go on counting."""
        rejected = {str(reason): count for reason, count in totals.rejected.items()}
        return cls(totals.peers, totals.batches_received, rejected)

    def since(self, before: "Counts") -> "Counts":
        """What has come since `before`, and the peers of now."""
        new = Counter(self.rejected)
        new.subtract(before.rejected)
        return Counts(self.peers, self.batches_received - before.batches_received, dict(+new))


class Silent:
    """The network of a node that trains alone."""

    async def share(self, groups: Sequence[ScoredGroup], number: int, /) -> int:
        """Send nothing."""
        return 0

    def totals(self) -> Counts:
        """Nothing has come."""
        return Counts()

    async def deliver(self, groups: Sequence[ScoredGroup], number: int, /) -> None:
        """Never returns: there is nobody to hear them."""
        await trio.sleep_forever()

    def trained(self, groups: Mapping[str, int]) -> None:
        """There is nobody to tell."""

    async def wait_for_peers(self, count: int, seconds: float) -> int:
        """There is nobody to wait for."""
        return 0


class CurrentRound:
    """The number of the round in hand, for what comes from others meanwhile. Call it to read it."""

    def __init__(self, number: int = 1) -> None:
        self.number = number

    def __call__(self) -> int:
        return self.number


class DurablePool:
    """`rl.protocols.Pool` over SQLite: writing waits while the disk is full."""

    def __init__(self, pool: SqlitePool, disk: Disk) -> None:
        self._pool = pool
        self._disk = disk

    async def add(self, groups: Sequence[ScoredGroup]) -> None:
        """See `rl.protocols.Pool`. Raises DiskFullError if told to stop while it waits."""

        async def write() -> None:
            self._pool.add(groups)

        await self._disk.write("the pool", write)

    async def candidates(self, since: int, reuse: int) -> list[Candidate]:
        """See `rl.protocols.Pool`."""
        return self._pool.candidates(since, reuse)

    async def take(self, ids: Collection[int]) -> dict[int, ScoredGroup]:
        """See `rl.protocols.Pool`."""
        return self._pool.take(ids)

    async def settle(self, used: Collection[int], refused: Collection[int], number: int) -> None:
        """See `rl.protocols.Pool`. Raises DiskFullError if told to stop while it waits."""

        async def write() -> None:
            self._pool.settle(used, refused, number)

        await self._disk.write("the pool", write)
