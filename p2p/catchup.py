"""Catch-up: what gossip lost, asked of a neighbour over a stream. Late and stalled nodes get everything this way.

A node visits every peer that it connects to, some peers when it notices that it stood still itself, and one at random
every half minute. It asks what the peer got since the last visit, and takes what it lacks, the oldest first. Each peer
is believed as little as in gossip: every envelope goes through admission, and sizes, counts and times are bounded.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import trio

from p2p.limits import Recent
from p2p.serving import (
    MAX_ANSWER,
    MAX_GET,
    PROTOCOL,
    SESSION_BYTES,
    SESSION_COUNT,
    Garbled,
    Server,
    get_frame,
    list_frame,
    parse_have,
)
from p2p.store import EnvelopeStore
from p2p.transport import FrameTooLong, Transport, TransportError, Verdict
from p2p.wire import MAX_ENVELOPE, WireError, open_envelope

FIRST_AGE = 600.0
"""Seconds asked for from a peer that was not visited before. Rollouts are worth less the older their policy is."""

MARGIN = 10.0
"""Seconds asked for beyond the last visit: what was on its way then."""

EVERY = 30.0
"""Seconds between visits of a random peer."""

STALL_SECONDS, BEAT_SECONDS = 3.0, 0.5
"""A beat that comes so late means that this process stood still, or the machine slept."""

NEIGHBOURS = 3
"""Peers to visit after that: more than one, since connections may have died meanwhile."""

AGAIN_SECONDS = 5.0
"""A second visit follows the first so much later: the gossip mesh is made about a second after connecting, and what was
published just before it is in nobody's hands but in the peer's store."""

HEDGE_SECONDS, VISITS = 2.0, 8
"""The next visit begins when the one before is over, or after so many seconds beside it; at most so many at once."""

LIST_SECONDS, CHUNK_SECONDS, VISIT_SECONDS = 8.0, 15.0, 55.0
"""Time for a list, for one chunk, and for a whole visit: a little less than the server gives."""

CLAIM_SECONDS = 3.0
"""What one peer was asked for is asked of no other for so long: a slow one must not withhold it."""

CHUNK_BYTES = 512 * 1024
"""In one chunk, beyond the first envelope: 35 KB/s are fast enough."""

CROWDED = 256
"""While so many batches wait for admission, catch-up holds back: gossip shall find room."""

_IDENTIFY_SECONDS, _LOOK_SECONDS = 10.0, 0.2
_FAILURES = 4
_PEERS = 1024


class Gate(Protocol):
    """What catch-up needs of `p2p.admission.Admission`."""

    @property
    def waiting(self) -> int:
        """Batches that wait for their check."""
        ...

    def knows(self, envelope_id: bytes) -> bool:
        """Whether an envelope was taken, or refused for good."""
        ...

    def check(self, data: bytes, forwarder: str, *, requested: bool = False) -> Verdict:
        """Judge an envelope. One that is ignored and still not known may be handed over again later."""
        ...


class _Unasked(Exception):
    """A peer sent something else than what was asked for."""


class _Refused(Exception):
    """Admission rejected what a peer sent, and has blamed it already."""


@dataclass(slots=True)
class _Due:
    """A visit to make. `since` is when it was wanted first; `twice` asks for another one after it."""

    at: float
    since: float
    failures: int = 0
    twice: bool = False


class CatchUp:
    """Both sides. `misbehaved(peer, what)` is told of garbage, `refused(peer)` says who is banned.

    `heard` are the shards, out of `shards`, whose envelopes this node wants.
    """

    def __init__(
        self,
        transport: Transport,
        store: EnvelopeStore,
        gate: Gate,
        misbehaved: Callable[[str, str], None],
        refused: Callable[[str], bool] = lambda peer: False,
        *,
        shards: int = 1,
        heard: Sequence[int] = (0,),
        every: float = EVERY,
        rng: random.Random | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._transport = transport
        self._store = store
        self._gate = gate
        self._misbehaved = misbehaved
        self._refused = refused
        self._shards = shards
        self._heard = heard
        self._every = every
        self._rng = rng or random.Random()
        self._now = now
        self._server = Server(store, misbehaved, refused)
        self._due: dict[str, _Due] = {}
        self._visiting: set[str] = set()
        self._claimed: dict[bytes, float] = {}
        self._visited = Recent[str, float](_PEERS)
        self._wake = trio.Event()
        self.recovered = 0
        """Envelopes that came this way and were new."""

    def serve(self) -> None:
        """Answer others from now on."""
        self._transport.serve(PROTOCOL, self._server.answer)

    def connected(self, peer: str) -> None:
        """A peer is there, perhaps again."""
        self._want(peer, twice=True)

    def disconnected(self, peer: str) -> None:
        """A peer is gone."""
        self._due.pop(peer, None)

    def stalled(self) -> None:
        """This process stood still: anything may have been missed, from anybody."""
        self._visited = Recent(_PEERS)
        peers = [connection.peer for connection in self._transport.connections()]
        for peer in self._rng.sample(peers, min(NEIGHBOURS, len(peers))):
            self._want(peer, twice=True)

    async def run(self) -> NoReturn:
        """Make the visits that are due, for ever."""
        slots = trio.Semaphore(VISITS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_for_stalls)
            nursery.start_soon(self._visit_now_and_then)
            while True:
                await slots.acquire()
                peer = await self._next()
                over = trio.Event()
                nursery.start_soon(self._visit, peer, self._due.pop(peer), slots, over)
                with trio.move_on_after(HEDGE_SECONDS):
                    await over.wait()
        raise AssertionError("the loop above never ends")

    # When to visit whom

    async def _watch_for_stalls(self) -> NoReturn:
        while True:
            ticks, clock = trio.current_time(), self._now()
            await trio.sleep(BEAT_SECONDS)
            # The monotonic clock stands still while a machine sleeps, the clock on the wall does not.
            if max(trio.current_time() - ticks, self._now() - clock) > BEAT_SECONDS + STALL_SECONDS:
                self.stalled()

    async def _visit_now_and_then(self) -> NoReturn:
        while True:
            await trio.sleep(self._every * self._rng.uniform(0.75, 1.25))
            peers = [connection.peer for connection in self._transport.connections()]
            peers = [peer for peer in peers if PROTOCOL in self._transport.protocols(peer)]
            if peers:
                self._want(self._rng.choice(peers))

    def _want(self, peer: str, pause: float = 0.0, failures: int = 0, twice: bool = False) -> None:
        now = trio.current_time()
        due = self._due.get(peer)
        if due is None:
            self._due[peer] = _Due(now + pause, now + pause, failures, twice)
        else:
            due.at, due.failures, due.twice = min(due.at, now + pause), min(due.failures, failures), due.twice or twice
        self._wake.set()

    async def _next(self) -> str:
        """A peer whose visit is due; waits for one."""
        while True:
            now, pause = trio.current_time(), math.inf
            for peer, due in [*self._due.items()]:
                if peer in self._visiting:
                    continue
                if due.at <= now and self._may_visit(peer, due, now):
                    return peer
                pause = min(pause, due.at - now)
            self._wake = trio.Event()
            with trio.move_on_after(max(pause, 0.0)):
                await self._wake.wait()

    def _may_visit(self, peer: str, due: _Due, now: float) -> bool:
        """Whether now; if its protocols are not known yet, soon; if it is not to be visited, never."""
        protocols = self._transport.protocols(peer)
        if PROTOCOL in protocols and not self._refused(peer):
            return True
        if now - due.since > _IDENTIFY_SECONDS or self._refused(peer):
            del self._due[peer]
        due.at = now + _LOOK_SECONDS
        return False

    async def _visit(self, peer: str, due: _Due, slots: trio.Semaphore, over: trio.Event) -> None:
        self._visiting.add(peer)
        began, before = trio.current_time(), self.recovered
        try:
            pause = await self._tried(peer, due.failures)
        finally:
            self._visiting.discard(peer)
            slots.release()
            over.set()
            self._wake.set()
        if not self._is_connected(peer):
            return
        if pause == 0:
            self._visited.put(peer, began)
            if due.twice:
                self._want(peer, AGAIN_SECONDS)
        elif pause < math.inf:
            self._want(peer, pause, 0 if self.recovered > before else due.failures + 1, due.twice)

    async def _tried(self, peer: str, failures: int) -> float:
        """Visit a peer. Returns 0 if nothing is missing now, else the seconds after which to come again."""
        if failures > _FAILURES:
            return math.inf
        try:
            with trio.fail_after(VISIT_SECONDS):
                return await self._session(peer)
        except (Garbled, _Unasked, FrameTooLong) as error:
            self._misbehaved(peer, str(error))
            return math.inf
        except _Refused:
            return math.inf
        except (TransportError, trio.TooSlowError):
            return float(2**failures)

    def _is_connected(self, peer: str) -> bool:
        return any(connection.peer == peer for connection in self._transport.connections())

    # One visit

    async def _session(self, peer: str) -> float:
        began = self._visited.get(peer)
        age = FIRST_AGE if began is None else min(trio.current_time() - began + MARGIN, FIRST_AGE)
        async with self._transport.open(peer, PROTOCOL) as stream:
            with trio.fail_after(LIST_SECONDS):
                await stream.send(list_frame(age, self._shards, self._heard))
                listed = parse_have(await stream.receive(MAX_ANSWER))
            if isinstance(listed, float):
                return max(listed, 1.0)
            missing, whole = self._missing(listed)
            while chunk := self._chunk(missing):
                self._claimed |= dict.fromkeys(chunk, trio.current_time() + CLAIM_SECONDS)
                try:
                    with trio.fail_after(CHUNK_SECONDS):
                        await stream.send(get_frame(chunk))
                        answers = [await stream.receive(MAX_ENVELOPE) for _ in chunk]
                    for id_, data in zip(chunk, answers, strict=True):
                        # Empty: the peer has dropped it meanwhile.
                        if data:
                            await self._hand_over(peer, id_, data)
                        del missing[id_]
                finally:
                    for id_ in chunk:
                        self._claimed.pop(id_, None)
        # What is left was claimed by another visit, which may fail.
        return 0.0 if whole and not missing else AGAIN_SECONDS / 2

    def _missing(self, listed: list[tuple[bytes, int]]) -> tuple[dict[bytes, int], bool]:
        """Of a list, newest first: what is lacking and fits a session, oldest first, and whether that is all."""
        lacking = [(id_, size) for id_, size in listed if not self._has(id_)]
        room, count = SESSION_BYTES, 0
        for _, size in lacking[:SESSION_COUNT]:
            room -= size
            if room < 0:
                break
            count += 1
        return dict(reversed(lacking[:count])), count == len(lacking)

    def _chunk(self, missing: dict[bytes, int]) -> list[bytes]:
        """What to ask for next. Drops from `missing` what has come meanwhile."""
        for id_ in [id_ for id_ in missing if self._has(id_)]:
            del missing[id_]
        chunk: list[bytes] = []
        room, now = CHUNK_BYTES, trio.current_time()
        for id_, size in missing.items():
            if self._claimed.get(id_, 0.0) > now:
                continue
            if len(chunk) == MAX_GET or (chunk and size > room):
                break
            chunk.append(id_)
            room -= size
        return chunk

    def _has(self, id_: bytes) -> bool:
        return id_ in self._store or self._gate.knows(id_)

    async def _hand_over(self, peer: str, id_: bytes, data: bytes) -> None:
        """To admission, as soon as it has room. Raises _Unasked and _Refused."""
        while True:
            # A check is a millisecond of work: others have a turn between two.
            await trio.lowlevel.checkpoint()
            if self._has(id_) or self._refused(peer):
                return
            if self._gate.waiting < CROWDED:
                verdict = self._gate.check(data, peer, requested=True)
                if self._gate.knows(id_):
                    self.recovered += verdict is Verdict.ACCEPT
                    return
                if verdict is Verdict.REJECT:
                    raise _Refused
                if not _is_named(id_, data):
                    raise _Unasked("it answered a catch-up with an envelope that was not asked for")
            await trio.sleep(_LOOK_SECONDS)


def _is_named(id_: bytes, data: bytes) -> bool:
    try:
        return open_envelope(data).id == id_
    except WireError:
        return False
