"""The giving side of catch-up: frames of `/swarmnode/catchup/2`, and the answers to those who missed something.

A session is one stream: the client asks for a list once, then for envelopes, a few at a time and only what was listed.
docs/protocol.md has every byte. Whoever asks for more than an honest client can, or for nonsense, is reported.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import trio

from p2p.canonical import CanonicalError, decode, encode
from p2p.gossip import shard_of
from p2p.limits import Bucket, Recent
from p2p.store import EnvelopeStore
from p2p.transport import FrameTooLong, Stream
from p2p.wire import MAX_ENVELOPE

PROTOCOL = "/swarmnode/catchup/2"

ID_BYTES, ENTRY_BYTES = 32, 36
"""An envelope's id; in a list four bytes follow it, big-endian: the envelope's size."""

MAX_LISTED = 8192
MAX_GET = 32
"""Envelopes asked for at once: the client hands them over before it asks for more."""

MAX_AGE = 3600
"""Seconds that may be asked for. No store reaches so far back."""

SESSION_BYTES = 16 * 2**20
SESSION_COUNT = 1024
SESSION_SECONDS = 60.0
"""What one session gives at most; a client that wants more comes again."""

MAX_REQUEST = 4096
MAX_ANSWER = ENTRY_BYTES * MAX_LISTED + 64
"""Bytes of a request, and of the answer to `list`."""

_SESSIONS = 16
"""At the same time, over all peers."""

_PEER_SESSIONS = 2
_REFILL_SECONDS, _BURST = 4.0, 12.0
"""Sessions of one peer. An honest one comes twice after it connects, then every half minute at most; what is left is
for connections that come and go, and for repairs of more than one session holds."""

_FLOOD_PER_SECOND, _FLOOD = 2.0, 60.0
"""Sessions of one peer that are answered with `busy` before it is reported. An honest one then waits some seconds."""

_MAX_SHARDS, _MAX_WANTED = 1024, 64
_PEERS = 1024


class Garbled(Exception):
    """A frame that no honest program sends."""


def list_frame(age: float, shards: int, wanted: Sequence[int]) -> bytes:
    """Ask what came in the last `age` seconds from the peers of the `wanted` ones of so many shards."""
    return encode(["list", min(int(age) + 1, MAX_AGE), shards, list(wanted)])


def get_frame(ids: Iterable[bytes]) -> bytes:
    """Ask for the envelopes of these ids, in this order."""
    return encode(["get", b"".join(ids)])


def parse_list(frame: bytes) -> tuple[int, int, frozenset[int]]:
    """(age, shards, wanted) of a `list` request. Raises Garbled."""
    match _values(frame):
        case ["list", int(age), int(shards), list(wanted)] if (
            0 <= age <= MAX_AGE
            and 1 <= shards <= _MAX_SHARDS
            and 1 <= len(wanted) <= _MAX_WANTED
            # A bool is an int here.
            and all(type(number) is int for number in (age, shards, *wanted))
            and all(0 <= number < shards for number in wanted)
        ):
            return age, shards, frozenset(wanted)
    raise Garbled("a catch-up request that does not ask for a list")


def parse_get(frame: bytes) -> list[bytes]:
    """The ids of a `get` request. Raises Garbled."""
    match _values(frame):
        case ["get", bytes(ids)] if ids and len(ids) % ID_BYTES == 0 and len(ids) <= ID_BYTES * MAX_GET:
            return [ids[place : place + ID_BYTES] for place in range(0, len(ids), ID_BYTES)]
    raise Garbled("a catch-up request that does not ask for envelopes")


def parse_have(frame: bytes) -> list[tuple[bytes, int]] | float:
    """The answer to `list`: (id, bytes) of each envelope, newest first; or seconds to wait. Raises Garbled."""
    match _values(frame):
        case ["busy", int(seconds)] if 0 <= seconds <= MAX_AGE:
            return float(seconds)
        case ["have", bytes(entries)] if len(entries) % ENTRY_BYTES == 0 and len(entries) <= ENTRY_BYTES * MAX_LISTED:
            found = [_entry(entries[place : place + ENTRY_BYTES]) for place in range(0, len(entries), ENTRY_BYTES)]
            if all(0 < size <= MAX_ENVELOPE for _, size in found) and len({id_ for id_, _ in found}) == len(found):
                return found
    raise Garbled("a catch-up answer that is no list")


def _entry(data: bytes) -> tuple[bytes, int]:
    return data[:ID_BYTES], int.from_bytes(data[ID_BYTES:], "big")


def _values(frame: bytes) -> Any:
    try:
        values = decode(frame, max_values=5 + _MAX_WANTED, max_depth=2)
    except CanonicalError as error:
        raise Garbled(f"a catch-up frame that is no msgpack of ours: {error}") from error
    if encode(values) != frame:
        raise Garbled("a catch-up frame that is not canonical")
    return values


class Server:
    """Answers from `store`. `misbehaved(peer, what)` is told of garbage, `refused(peer)` says who gets nothing."""

    def __init__(
        self, store: EnvelopeStore, misbehaved: Callable[[str, str], None], refused: Callable[[str], bool]
    ) -> None:
        self._store = store
        self._misbehaved = misbehaved
        self._refused = refused
        self._buckets = Recent[str, Bucket](_PEERS)
        self._patience = Recent[str, Bucket](_PEERS)
        self._now: Counter[str] = Counter()

    async def answer(self, stream: Stream) -> None:
        """One session. Raises TransportError."""
        peer = stream.peer
        if self._refused(peer):
            return
        try:
            if (pause := self._too_much(peer)) is not None:
                if not _bucket(self._patience, peer, _FLOOD_PER_SECOND, _FLOOD).take(trio.current_time()):
                    raise Garbled("a flood of catch-up requests")
                await stream.receive(MAX_REQUEST)
                await stream.send(encode(["busy", pause]))
                return
            with self._counted(peer), trio.move_on_after(SESSION_SECONDS):
                await self._session(stream)
        except Garbled as error:
            self._misbehaved(peer, str(error))
        except FrameTooLong as error:
            self._misbehaved(peer, str(error))
            raise

    async def _session(self, stream: Stream) -> None:
        age, shards, wanted = parse_list(await stream.receive(MAX_REQUEST))
        listed = self._store.recent(age, MAX_LISTED, lambda origin: shard_of(origin, shards) in wanted)
        await stream.send(encode(["have", b"".join(id_ + size.to_bytes(4, "big") for id_, size in listed)]))
        left, count, room = {id_ for id_, _ in listed}, SESSION_COUNT, SESSION_BYTES
        while left:
            asked = parse_get(await stream.receive(MAX_REQUEST))
            count -= len(asked)
            if len({*asked} & left) < len(asked) or count < 0:
                raise Garbled("a catch-up request for what was not offered")
            left.difference_update(asked)
            for id_ in asked:
                data = self._store.get(id_) or b""
                room -= len(data)
                if room < 0:
                    raise Garbled("a catch-up request for more than a session's bytes")
                await stream.send(data)

    def _too_much(self, peer: str) -> int | None:
        """Seconds after which to come again, if not now."""
        if self._now.total() >= _SESSIONS or self._now[peer] >= _PEER_SESSIONS:
            return 5
        bucket = _bucket(self._buckets, peer, 1 / _REFILL_SECONDS, _BURST)
        return None if bucket.take(trio.current_time()) else 2 * round(_REFILL_SECONDS)

    @contextmanager
    def _counted(self, peer: str) -> Iterator[None]:
        self._now[peer] += 1
        try:
            yield
        finally:
            self._now[peer] -= 1
            if not self._now[peer]:
                del self._now[peer]


def _bucket(buckets: Recent[str, Bucket], peer: str, rate: float, burst: float) -> Bucket:
    """The peer's bucket, a full one if it has none yet."""
    bucket = buckets.get(peer)
    if bucket is None:
        bucket = Bucket(rate, burst, trio.current_time())
        buckets.put(peer, bucket)
    return bucket
