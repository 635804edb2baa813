"""What this node can give to those that missed it: the envelopes of the last minutes, its own and accepted ones."""

from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from p2p.wire import Envelope

MAX_BYTES = 64 * 2**20
MAX_COUNT = 8192
MAX_AGE = 900.0
"""Seconds. Older rollouts are worth little to a policy that has moved on."""

ORIGIN_SHARE = 4
"""One origin has at most this part of the room: a quarter, so that a swarm of two still keeps plenty."""


@dataclass(frozen=True, slots=True)
class _Held:
    data: bytes
    origin: str
    at: float


@dataclass(slots=True)
class _Origin:
    ids: dict[bytes, None] = field(default_factory=dict)
    size: int = 0


class EnvelopeStore:
    """Envelopes by id, in the order in which they came. When full, whoever takes most of the room loses its oldest."""

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        max_count: int = MAX_COUNT,
        max_age: float = MAX_AGE,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_count = max_count
        self._max_age = max_age
        self._clock = clock
        self._held: dict[bytes, _Held] = {}
        self._origins: dict[str, _Origin] = {}
        self._size = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, id_: bytes) -> bool:
        return id_ in self._held

    @property
    def size(self) -> int:
        """Bytes of all envelopes."""
        return self._size

    def add(self, envelope: Envelope) -> None:
        """Keep an envelope; one that is there keeps its place."""
        if envelope.id in self._held:
            return
        origin = self._origins.setdefault(envelope.origin, _Origin())
        self._held[envelope.id] = _Held(envelope.data, envelope.origin, self._clock())
        origin.ids[envelope.id] = None
        origin.size += len(envelope.data)
        self._size += len(envelope.data)
        self._drop_old()
        while origin.size > self._max_bytes // ORIGIN_SHARE or len(origin.ids) > self._max_count // ORIGIN_SHARE:
            self.forget(next(iter(origin.ids)))
        while self._size > self._max_bytes or len(self._held) > self._max_count:
            largest = max(self._origins.values(), key=lambda one: (one.size, len(one.ids)))
            self.forget(next(iter(largest.ids)))

    def get(self, id_: bytes) -> bytes | None:
        """The bytes of an envelope, if it is there."""
        held = self._held.get(id_)
        return None if held is None else held.data

    def recent(self, age: float, limit: int, wanted: Callable[[str], bool]) -> list[tuple[bytes, int]]:
        """(id, bytes) of what came in the last `age` seconds from origins that are `wanted`: the newest first, at most
        `limit` of them."""
        self._drop_old()
        since = self._clock() - age
        known: dict[str, bool] = {}
        found: list[tuple[bytes, int]] = []
        for id_, held in reversed(self._held.items()):
            if held.at < since or len(found) >= limit:
                break
            if held.origin not in known:
                known[held.origin] = wanted(held.origin)
            if known[held.origin]:
                found.append((id_, len(held.data)))
        return found

    def forget(self, id_: bytes) -> None:
        """Drop an envelope, if it is there."""
        held = self._held.pop(id_, None)
        if held is None:
            return
        self._size -= len(held.data)
        origin = self._origins[held.origin]
        origin.size -= len(held.data)
        del origin.ids[id_]
        if not origin.ids:
            del self._origins[held.origin]

    def forget_origin(self, peer: str) -> None:
        """Drop all that a peer made."""
        if (origin := self._origins.get(peer)) is not None:
            for id_ in [*origin.ids]:
                self.forget(id_)

    def _drop_old(self) -> None:
        oldest = self._clock() - self._max_age
        while self._held:
            id_, held = next(iter(self._held.items()))
            if held.at >= oldest:
                return
            self.forget(id_)
