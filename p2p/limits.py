"""The small machinery of limits: token buckets, memories of bounded size, and a queue that is fair to its sources."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Bucket:
    """A token bucket: `rate` tokens a second flow in, at most `burst` are in it. Full at first.

    Times are seconds of any clock, the same for all calls; one that goes backwards adds nothing.
    """

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = now

    def take(self, now: float) -> bool:
        """Take one token, if there is one."""
        self._flow(now)
        if self._level < 1:
            return False
        self._level -= 1
        return True

    def charge(self, now: float, amount: float) -> None:
        """Take so much, also more than is in it: what is missing has to flow in before `wait` is over."""
        self._flow(now)
        self._level -= amount

    def wait(self, now: float) -> float:
        """Seconds until something is in it; 0 if something is."""
        self._flow(now)
        return max(-self._level / self._rate, 1e-3) if self._level <= 0 else 0.0

    def _flow(self, now: float) -> None:
        self._level = min(self._level + max(now - self._at, 0.0) * self._rate, self._burst)
        self._at = max(now, self._at)


class Recent(Generic[K, V]):
    """The last `size` things, by key: those longest unused are forgotten first."""

    __slots__ = ("_items", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def get(self, key: K) -> V | None:
        """What is remembered under `key`, which counts as a use."""
        if key in self._items:
            self._items.move_to_end(key)
        return self._items.get(key)

    def peek(self, key: K) -> V | None:
        """The same, but not a use: for onlookers."""
        return self._items.get(key)

    def put(self, key: K, value: V) -> None:
        """Remember it."""
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > self._size:
            self._items.popitem(last=False)

    def pop(self, key: K) -> None:
        """Forget it, if it is remembered."""
        self._items.pop(key, None)


class FairQueue(Generic[V]):
    """Things that wait, by source: at most `each` of one source and `total` of all. Sources take turns."""

    def __init__(self, each: int, total: int) -> None:
        self._each = each
        self._total = total
        self._waiting: OrderedDict[str, deque[V]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def sources(self) -> list[str]:
        """Sources with something that waits, the one whose turn is next first."""
        return list(self._waiting)

    def length(self, source: str) -> int:
        """How many things of this source wait."""
        return len(self._waiting.get(source, ()))

    def put(self, source: str, item: V) -> tuple[bool, str | None]:
        """(whether there was room, the source that had to give up its newest for it).

        When all is full, the longest line yields to a shorter one: many things of one cannot keep out few of others.
        """
        length = self.length(source)
        if length >= self._each:
            return False, None
        loser = None
        if self._count >= self._total:
            loser = max(self._waiting, key=lambda other: len(self._waiting[other]))
            if self.length(loser) <= length + 1:
                return False, None
            self._waiting[loser].pop()
            self._count -= 1
        self._waiting.setdefault(source, deque()).append(item)
        self._count += 1
        return True, loser

    def take(self, source: str) -> V:
        """The oldest of a source, which then goes to the end of the turns. Raises KeyError if it has nothing."""
        line = self._waiting.pop(source)
        item = line.popleft()
        self._count -= 1
        if line:
            self._waiting[source] = line
        return item

    def drop(self, source: str) -> int:
        """Throw away all of a source. Returns how many that were."""
        dropped = len(self._waiting.pop(source, ()))
        self._count -= dropped
        return dropped
