"""What gossip remembers, all of it bounded: ids of messages seen, recent messages, and what waits for a peer."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import trio

_SEEN_SECONDS = 300.0
_SEEN_COUNT = 100_000
_CACHE_BYTES = 24 * 1024 * 1024
_HISTORY, _OFFERED = 5, 3  # heartbeats that a message is kept, and is offered to others
_OUTBOX_BYTES = 8 * 1024 * 1024
_OUTBOX_COUNT = 4096
_MISSED = 128


class Seen:
    """Ids of messages for some minutes."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, message_id: bytes) -> bool:
        return message_id in self._until

    def add(self, message_id: bytes, now: float) -> bool:
        """Remember an id. False if it was known."""
        if message_id in self._until:
            return False
        self._until[message_id] = now + _SEEN_SECONDS
        while len(self._until) > _SEEN_COUNT or next(iter(self._until.values())) < now:
            self._until.popitem(last=False)
        return True


class Recent:
    """The newest messages as encoded frames, for peers that ask after hearing of them."""

    def __init__(self) -> None:
        self._frames: OrderedDict[bytes, tuple[str, bytes, int]] = OrderedDict()
        self._bytes = 0
        self._beat = 0

    def put(self, message_id: bytes, topic: str, frame: bytes) -> None:
        """Keep a frame; the oldest go when there is too much."""
        self._frames[message_id] = (topic, frame, self._beat)
        self._bytes += len(frame)
        while self._bytes > _CACHE_BYTES:
            self._drop()

    def get(self, message_id: bytes) -> bytes | None:
        """A frame that is still here."""
        entry = self._frames.get(message_id)
        return None if entry is None else entry[1]

    def offers(self, topic: str) -> Iterator[bytes]:
        """Ids of a topic's messages of the last heartbeats, newest first."""
        for message_id, (of, _, beat) in reversed(self._frames.items()):
            if beat <= self._beat - _OFFERED:
                return
            if of == topic:
                yield message_id

    def beat(self) -> None:
        """A heartbeat has passed."""
        self._beat += 1
        while self._frames and next(iter(self._frames.values()))[2] <= self._beat - _HISTORY:
            self._drop()

    def _drop(self) -> None:
        _, (_, frame, _) = self._frames.popitem(last=False)
        self._bytes -= len(frame)


class Outbox:
    """Frames that wait to be written to one peer. Frames are shared between peers, so the bytes are counted twice."""

    def __init__(self) -> None:
        self._urgent: deque[bytes] = deque()
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._filled = trio.lowlevel.ParkingLot()
        self._taken = trio.lowlevel.ParkingLot()

    def fits(self, frame: bytes) -> bool:
        """Whether a frame can be added."""
        return self._bytes + len(frame) <= _OUTBOX_BYTES and len(self._frames) + len(self._urgent) < _OUTBOX_COUNT

    def push(self, frame: bytes, urgent: bool = False) -> bool:
        """Add a frame, before all that are not urgent if it is. False if there is no room."""
        if not self.fits(frame):
            return False
        (self._urgent if urgent else self._frames).append(frame)
        self._bytes += len(frame)
        self._filled.unpark_all()
        return True

    async def room(self, frame: bytes) -> None:
        """Wait until a frame can be added."""
        while not self.fits(frame):
            await self._taken.park()

    async def pop(self) -> bytes:
        """The next frame to write."""
        while not self._urgent and not self._frames:
            await self._filled.park()
        frame = (self._urgent or self._frames).popleft()
        self._bytes -= len(frame)
        self._taken.unpark_all()
        return frame

    def clear(self) -> None:
        """Forget everything."""
        self._urgent.clear()
        self._frames.clear()
        self._bytes = 0
        self._taken.unpark_all()


@dataclass(eq=False)
class Link:
    """What gossip knows of one connected peer."""

    peer: str
    outbound: bool
    outbox: Outbox = field(default_factory=Outbox)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    reading: trio.CancelScope | None = None
    writable: bool = False
    protocol: str = ""
    topics: set[str] = field(default_factory=set)
    backoff: dict[str, float] = field(default_factory=dict)
    unwanted: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    missed: deque[tuple[str, bytes]] = field(default_factory=lambda: deque(maxlen=_MISSED))
    # Counted from heartbeat to heartbeat.
    asked: int = 0
    answered: int = 0
    control: int = 0
    useless: int = 0
    scolded: bool = False
