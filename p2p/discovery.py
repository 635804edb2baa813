"""Finding others and staying with them: the redial loop.

One task looks once a second at who is connected and dials whom it misses, a bounded number at a time. Addresses to
join are tried for ever. Nodes met within the last hour are tried every few seconds, whatever the number of connections,
since a swarm that was cut in two must grow together again soon after its network is whole. All others are tried less
and less often, and only while there are too few connections.
"""

import contextlib
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NoReturn

import trio

from p2p.addresses import Address, parse_address
from p2p.gossip import shard_of, shards_heard, topic_of
from p2p.ids import short
from p2p.joins import MAX_RESOLVED, Join, Resolve, Waits, system_resolve
from p2p.peerbook import Peer, PeerBook, Say
from p2p.settings import NetworkSettings
from p2p.transport import Transport, TransportError

TARGET, CHOSEN = 8, 4
"""Connections to look for, and those of them to make itself: whoever connects to it may be one and the same. More are
welcome; the gossip mesh has six to eight."""

DIALS = 8
"""Dials at once. Each is a socket and a handshake, which costs the event loop milliseconds."""

LOOK_SECONDS = 1.0
STALL_SECONDS = 3.0
"""Longer without a look than this: the process was stopped or the machine slept, so connections may be dead."""

DIAL_SECONDS = 5.0
"""For one address. TCP's first tries go out at 0, 1 and 3 s, so nothing is lost by starting over then."""

SHARD_TARGET, SHARD_CHOSEN = 6, 3
"""The same with nodes of each shard that this one hears: a mesh has four to eight peers."""

RESOLVE_SECONDS = 5.0
RECENT_SECONDS = 3600.0
RECENT_CAP, JOIN_CAP, KNOWN_CAP = 4.0, 60.0, 900.0
"""Longest pauses between tries, in seconds: for a node met within the last hour, an address to join, any other."""

KNOWN_FIRST = 4.0

SETTLED_SECONDS = 5.0
"""A connection that has stood so long was meant: its peer counts as met, and is redialled at once if it is lost."""

HEARSAY_TRIES = 6
"""Failures after which a node that was never met is forgotten. Whoever told of it may tell again."""

FORGET_SECONDS = 30 * 86400.0
"""A node that was met is forgotten when it has been away so long and does not answer."""

COMPLAIN_FAILURES = 4
"""Failures, over some ten seconds, after which an address to join is worth a line: nodes are often started together."""

ALONE_SECONDS = 10.0
SAVE_SECONDS = 60.0
REUNITE_SECONDS = 3.0
"""With connections enough, a missed node is tried this often."""

ADDRESSES_A_TRY = 3
"""Of one node, dialled one after the other: silent ones must not hold the place of a dial for long."""

_MAX_WAITS = 2048
_OURSELVES = "it leads to this node itself"


class Finder:
    """`refused(peer)` says whom not to dial: the banned. `rng` spreads the tries of many nodes."""

    def __init__(
        self,
        transport: Transport,
        settings: NetworkSettings,
        book: PeerBook,
        say: Say,
        refused: Callable[[str], bool] = lambda peer: False,
        resolve: Resolve | None = None,
        now: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._transport = transport
        self._settings = settings
        self._book = book
        self._say = say
        self._refused = refused
        self._resolve = resolve or system_resolve
        self._now = now
        self._rng = rng or random.Random()
        self._joins = [Join(parse_address(text)) for text in settings.join]
        self._waits: dict[str, Waits] = {}
        heard = shards_heard(transport.peer_id, settings.shards, settings.subscribe)
        # Where there is one topic, whoever is connected hears it.
        self._heard = heard if settings.shards > 1 else []
        self._connected: frozenset[str] = frozenset()
        self._chosen: frozenset[str] = frozenset()
        """Those of them that this node has dialled."""
        self._new: frozenset[str] = frozenset()
        """Those of them of whom it may not be known yet what they are subscribed to."""
        self._lost: set[str] = set()
        """Peers that this process was connected with, and is not any more."""
        self._dialling: set[str] = set()
        self._wake = trio.Event()
        self._alone_since: float | None = 0.0
        self._said_alone = False
        self._next_reunion = 0.0

    def found(self, address: str, source: Literal["mdns", "dht", "identify"]) -> None:
        """Told of an address of a node. Anything may be told: what cannot be used is dropped in silence."""
        try:
            parsed = parse_address(address)
        except ValueError:
            return
        if parsed.peer is None or parsed.peer == self._transport.peer_id:
            return
        if self._book.heard_of(parsed, sure=source == "identify") and parsed.peer not in self._connected:
            # A new address may be the right one. The local network is not written by strangers: it may start over.
            if source == "mdns":
                self._waits.pop(parsed.peer, None)
            else:
                self._waits.setdefault(parsed.peer, Waits(0, trio.current_time()))
            self.wake()

    def wake(self) -> None:
        """Look now rather than at the next second."""
        self._wake.set()

    def retry_all(self) -> None:
        """Forget all back-off and look now: something about the network has changed."""
        for waits in (*self._waits.values(), *(join.waits for join in self._joins)):
            waits.failures = 0
            waits.not_before = trio.current_time() + self._rng.uniform(0, 0.5)
        for join in self._joins:
            join.unsure.update(join.led_to)
        self._next_reunion = 0.0
        self.wake()

    async def run(self) -> NoReturn:
        """Dial and redial until cancelled, and keep the book on disk."""
        self._alone_since = trio.current_time()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._save_now_and_then)
                while True:
                    self._notice()
                    self._dial_due(nursery)
                    await self._pause()
        finally:
            self._book.save()
        raise AssertionError("the loop above never ends")

    async def _pause(self) -> None:
        """Until the next look. A pause that took far too long is a stall."""
        ticks, clock = trio.current_time(), self._now()
        with trio.move_on_after(LOOK_SECONDS):
            await self._wake.wait()
        self._wake = trio.Event()
        # The monotonic clock stands still while a machine sleeps, the clock on the wall does not.
        if max(trio.current_time() - ticks, self._now() - clock) > LOOK_SECONDS + STALL_SECONDS:
            self.retry_all()

    def _notice(self) -> None:
        """Compare who is connected now with before."""
        connections = self._transport.connections()
        peers = frozenset(connection.peer for connection in connections)
        for connection in connections:
            if connection.outbound and connection.peer not in self._connected:
                with contextlib.suppress(ValueError):
                    self._book.heard_of(parse_address(connection.address).of(connection.peer))
            if connection.seconds >= SETTLED_SECONDS:
                self._settled(connection.peer)
        self._new = frozenset(connection.peer for connection in connections if connection.seconds < SETTLED_SECONDS)
        self._chosen = frozenset(connection.peer for connection in connections if connection.outbound)
        lost, self._connected = self._connected - peers, peers
        self._lost = (self._lost | lost) - peers
        for peer in lost:
            self._waits.setdefault(peer, Waits(0, trio.current_time()))
        for join in self._joins:
            join.unsure.update(address for address, peer in join.led_to.items() if peer in lost)
            if any(map(join.is_led_to, lost)):
                soon = self._after(join.waits.failures, 1.0, JOIN_CAP) if join.waits.failures else 0.0
                join.waits.not_before = min(join.waits.not_before, soon)
        if lost and not peers:
            self.retry_all()
        self._tell(trio.current_time())

    def _settled(self, peer: str) -> None:
        self._book.met(peer)
        self._waits.pop(peer, None)
        for join in self._joins:
            if join.is_led_to(peer):
                join.waits.failures = 0
                # It was there: that it went away again is no mistake in the configuration.
                join.complained = True

    def _tell(self, time_now: float) -> None:
        """Say once when alone for a while, and once when not any more."""
        if self._connected:
            self._alone_since = None
            if self._said_alone:
                self._say("info", f"no longer alone: {len(self._connected)} connected")
            self._said_alone = False
        elif self._alone_since is None:
            self._alone_since = time_now
        elif not self._said_alone and time_now - self._alone_since >= ALONE_SECONDS:
            self._say("info", "no other node is reachable: this one goes on alone, and keeps looking")
            self._said_alone = True

    def _dial_due(self, nursery: trio.Nursery) -> None:
        """Start a dial for whatever is due, the most wanted first."""
        time_now = trio.current_time()
        for join in self._joins:
            if time_now >= join.waits.not_before and self._wants(join) and self._has_room():
                self._start(nursery, join.key, self._try_join, join)
        for known in self._missed(time_now):
            if self._has_room():
                self._start(nursery, known.peer, self._try_known, known, self._waits.setdefault(known.peer, Waits()))
        if len(self._waits) > _MAX_WAITS:
            self._waits = {peer: waits for peer, waits in self._waits.items() if peer in self._book}
        if len(self._lost) > _MAX_WAITS:
            self._lost = {peer for peer in self._lost if self._is_recent(self._book.get(peer))}

    def _missed(self, time_now: float) -> list[Peer]:
        """Peers of the book to dial now: as many as connections are wanted, or one that was lost, now and then."""
        due = [known for known in self._book.peers() if self._is_due(known, time_now) and self._may_dial(known.peer)]
        due = self._in_turn(due)
        needed = self._of_shards(due)
        missing = max(TARGET - len(self._connected), CHOSEN - len(self._chosen))
        wanted = missing - len(self._dialling) - len(needed)
        if wanted > 0:
            names = {known.peer for known in needed}
            return needed + [known for known in due if known.peer not in names][:wanted]
        # Only those lost: a node that has met many must not come to be connected with all of them.
        recent = [known for known in due if known.peer in self._lost and self._is_recent(known)]
        if needed or len(self._connected) < TARGET or not recent or time_now < self._next_reunion:
            return needed
        self._next_reunion = time_now + REUNITE_SECONDS
        return [self._rng.choice(recent)]

    def _in_turn(self, due: Sequence[Peer]) -> list[Peer]:
        """Those that have waited longest first, and of those that were not tried yet those met last.

        Nobody can take all turns by having been met later, or told more often, than others. Nodes met of late and all
        others have every second turn.
        """

        def since(known: Peer) -> float:
            waits = self._waits.get(known.peer)
            return waits.not_before if waits is not None else 0.0

        due = sorted(due, key=since)  # which leaves those alike in the order of the book
        lines = [[known for known in due if self._is_recent(known) is recent] for recent in (True, False)]
        self._rng.shuffle(lines)
        return [known for turn in itertools.zip_longest(*lines) for known in turn if known is not None]

    def _of_shards(self, due: Sequence[Peer]) -> list[Peer]:
        """Peers of the shards with which this node has too few connections. Whose shard is which follows from the id.

        Others may be subscribed to a shard as well, but nodes of one shard listen to the same others: if they were
        counted, all of them could come to be connected with each other alone, and with nobody who publishes there.
        Those that do not listen to their own shard are counted in the end, or they could take all connections; but not
        if they have come by themselves, or a dozen of them would keep this node from looking for others at all.
        """
        needed: list[Peer] = []
        for shard in self._heard:
            subscribed = {*self._transport.subscribers(topic_of(self._settings.swarm, shard))}
            members = {peer for peer in (*self._connected, *self._dialling) if self._is_of(peer, shard)}
            useful = members & (subscribed | self._new | self._dialling)
            made = self._chosen | self._dialling
            missing = max(SHARD_TARGET - len(useful), SHARD_CHOSEN - len(useful & made))
            wanted = min(missing, 2 * SHARD_TARGET - len(members & made))
            needed += [known for known in due if self._is_of(known.peer, shard)][: max(wanted, 0)]
        return needed

    def _is_of(self, peer: str, shard: int) -> bool:
        return shard_of(peer, self._settings.shards) == shard

    def _start(self, nursery: trio.Nursery, key: str, dial: Callable[..., Awaitable[None]], *args: object) -> None:
        async def run() -> None:
            try:
                await dial(*args)
            finally:
                self._dialling.discard(key)

        self._dialling.add(key)
        nursery.start_soon(run)

    async def _try_known(self, known: Peer, waits: Waits) -> None:
        # Also after a success: a node that takes connections only to close them must not be dialled every second.
        # What stands for a while clears it (`_settled`).
        waits.failures += 1
        reached = await self._dial_any(_some(known.addresses, waits.failures))
        if self._is_recent(known):
            waits.not_before = self._after(waits.failures, 1.0, RECENT_CAP)
        else:
            waits.not_before = self._after(waits.failures, KNOWN_FIRST, KNOWN_CAP)
        if reached:
            return
        self._book.failed(known.peer)
        long_gone = known.met > 0 and self._now() - known.met > FORGET_SECONDS
        if known.failures >= HEARSAY_TRIES and (long_gone or not known.met):
            self._book.forget(known.peer)

    async def _dial_any(self, addresses: list[Address]) -> bool:
        for address in addresses:
            if await self._dial(address) is None:
                return True
        return False

    async def _try_join(self, join: Join) -> None:
        problem = await self._reach(join)
        join.waits.failures += 1
        if problem is None and join.address.peer is None:
            # Where a name leads to changes: look again, but not soon.
            join.waits.not_before = self._after(1, JOIN_CAP, JOIN_CAP)
            return
        cap = RECENT_CAP if self._was_recent(join) else JOIN_CAP
        join.waits.not_before = self._after(join.waits.failures, 1.0, cap)
        if problem is not None and join.waits.failures >= COMPLAIN_FAILURES and not join.complained:
            join.complained = True
            self._say("warning", f"a node to join does not answer, and is tried on and on: {join.address}: {problem}")

    async def _reach(self, join: Join) -> str | None:
        """Dial every place that a join address leads to. Returns None if one answers, else why the last does not."""
        try:
            with trio.fail_after(RESOLVE_SECONDS):
                places = list(await self._resolve(join.address)) if join.address.is_name else [join.address]
        except trio.TooSlowError:
            return f"the name was not resolved within {RESOLVE_SECONDS:g} s"
        except OSError as error:
            return f"the name cannot be resolved: {error.strerror or error}"
        self._rng.shuffle(places)
        problem: str | None = "the name leads nowhere"
        reached = False
        for place in places[:MAX_RESOLVED]:
            if (known := join.surely(str(place))) in self._connected:
                reached = True
            elif known == self._transport.peer_id:
                problem = _OURSELVES
            else:
                problem = await self._dial(place, join)
                reached |= problem is None
            if reached and (place.peer is not None or not self._has_room(extra=1)):
                break
        return None if reached else problem

    async def _dial(self, address: Address, join: Join | None = None) -> str | None:
        """Dial one numeric address. Returns None if its peer is connected then, else why not."""
        try:
            with trio.fail_after(DIAL_SECONDS):
                peer = await self._transport.connect(str(address))
        except trio.TooSlowError:
            return f"no answer within {DIAL_SECONDS:g} s"
        except TransportError as error:
            return str(error)
        if join is not None and join.address.peer is None:
            join.leads_to(str(address), peer)
        if peer == self._transport.peer_id:
            return _OURSELVES
        if not self._may_be_kept(peer):
            await self._transport.disconnect(peer)
            return f"node {short(peer)} is refused here"
        self._book.reached(address.of(peer))
        return None

    def _wants(self, join: Join) -> bool:
        if join.address.peer is not None:
            return self._may_dial(join.address.peer)
        # Its nodes are known only by trying: looked up again while one may be missing.
        few = len(self._connected) < TARGET or not self._connected.intersection(join.led_to.values())
        return few and join.key not in self._dialling

    def _may_dial(self, peer: str) -> bool:
        free = peer not in self._connected and peer not in self._dialling
        return free and peer != self._transport.peer_id and self._may_be_kept(peer)

    def _may_be_kept(self, peer: str) -> bool:
        allow = self._settings.allow
        return (not allow or peer in allow) and not self._refused(peer)

    def _has_room(self, extra: int = 0) -> bool:
        """Room for another dial and its connection; `extra` dials of those that run are the asker's own."""
        dialling = len(self._dialling) - extra
        return dialling < DIALS and len(self._connected) + dialling < self._settings.max_peers

    def _is_due(self, known: Peer, time_now: float) -> bool:
        waits = self._waits.get(known.peer)
        return bool(known.addresses) and (waits is None or time_now >= waits.not_before)

    def _is_recent(self, known: Peer | None) -> bool:
        return known is not None and self._now() - known.met < RECENT_SECONDS

    def _was_recent(self, join: Join) -> bool:
        peers = [join.address.peer] if join.address.peer else [*join.led_to.values()]
        return any(self._is_recent(self._book.get(peer)) for peer in peers)

    def _after(self, failures: int, first: float, cap: float) -> float:
        """When to try again: twice as long after each failure, spread by a quarter either way."""
        pause = min(cap, first * 2.0 ** min(failures - 1, 16))
        return trio.current_time() + pause * self._rng.uniform(0.75, 1.25)

    async def _save_now_and_then(self) -> NoReturn:
        while True:
            await trio.sleep(SAVE_SECONDS)
            if (data := self._book.take_changes()) is not None:
                try:
                    await trio.to_thread.run_sync(self._book.write, data)
                except OSError as error:
                    self._book.not_written(error)


def _some(addresses: Sequence[Address], attempt: int) -> list[Address]:
    """The first, which is the best known, and some of the others: over a few tries all of them."""
    first, others, step = addresses[:1], [*addresses[1:]], ADDRESSES_A_TRY - 1
    start = step * (attempt - 1) % max(len(others), 1)
    return [*first, *(others[start:] + others[:start])[:step]]
