"""The swarm as the rest of the node sees it: share what was sampled, know who is there. Its parts meet here.

Nothing that a peer does gets past the parts. What is raised out of `open_swarm` is a fault of this program or its disk.
"""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.admission import Admission, Counts, Pool
from p2p.catchup import CatchUp
from p2p.contribution import Contribution
from p2p.discovery import Finder
from p2p.gossip import BURST, RATE, Gossip, ready_topic, shards_heard
from p2p.ids import short
from p2p.keeping import Keeper, Kept
from p2p.peerbook import PeerBook
from p2p.reasons import Reason
from p2p.reputation import Reputation
from p2p.settings import AdmissionSettings, NetworkSettings
from p2p.status import PeerRow, SwarmStatus, Totals
from p2p.store import EnvelopeStore
from p2p.transport import Connection, Transport, Verdict
from p2p.verification import Tasks
from p2p.wire import Envelope, seal_round
from rl.rollouts import RolloutGroup, ScoredGroup
from verifiers.base import TaskRef

__all__ = ["PeerRow", "Swarm", "SwarmStatus", "Totals", "Watcher", "open_swarm"]

logger = logging.getLogger(__name__)

Say = Callable[[str, str], None]
"""Tells the operator: a level (info, warning, error) and a text."""

MAX_ROWS = 256
"""Peers in a status."""

_LOOK_SECONDS = 0.2
_READY_SECONDS = 0.05
"""Nodes that wait for each other begin within about this time: the rounds of a tiny model are as short."""
_LIFT_SECONDS = 1.0


class Watcher:
    """What the transport tells (it is a `p2p.transport.Observer`) and may ask; bans begin and end here too.

    It is there before the transport, and quiet until it is told to `watch`.
    """

    def __init__(self, path: Path | None, now: Callable[[], float], say: Say) -> None:
        """`path` is where reputations are kept."""
        self.reputation = Reputation(path, self._ban, now, clock=trio.current_time, say=say)
        self._parts: _Parts | None = None
        self._blocked: set[str] = set()
        self.on_ban: Callable[[], None] = lambda: None
        """Told that a ban has begun."""

    def watch(self, parts: "_Parts") -> None:
        """Pass on what happens from now on, and make up for what has happened before."""
        self._parts = parts
        for peer in self.banned():
            self._ban(peer)
        for connection in parts.transport.connections():
            self.connected(connection.peer)

    def connected(self, peer: str) -> None:
        """See Observer."""
        if self._parts is not None:
            self._parts.catch_up.connected(peer)

    def disconnected(self, peer: str) -> None:
        """See Observer."""
        if self._parts is not None:
            self._parts.catch_up.disconnected(peer)
            self._parts.admission.forget(peer)
            self._parts.finder.wake()

    def misbehaved(self, peer: str, what: str) -> None:
        """See Observer."""
        logger.info("%s broke the protocol: %s", short(peer), what)
        if self._parts is not None:
            self._parts.admission.blame(peer, Reason.PROTOCOL)

    def score(self, peer: str) -> float:
        """What this node thinks of a peer; negative is bad. For the transport's own choice of peers."""
        return self.reputation.score(peer)

    def banned(self) -> frozenset[str]:
        """Peers whose ban runs now."""
        return frozenset(row.peer for row in self.reputation.standings() if row.banned)

    async def lift_bans(self) -> NoReturn:
        """Let peers in again whose ban is over."""
        while True:
            await trio.sleep(_LIFT_SECONDS)
            for peer in [peer for peer in self._blocked if not self.reputation.banned(peer)]:
                self._blocked.discard(peer)
                if self._parts is not None:
                    self._parts.transport.unblock(peer)

    def _ban(self, peer: str) -> None:
        self.on_ban()
        if self._parts is not None:
            self._blocked.add(peer)
            self._parts.store.forget_origin(peer)
            self._parts.transport.block(peer)


OpenTransport = Callable[[Watcher], AbstractAsyncContextManager[Transport]]
"""Opens the network; a function that takes any Observer will do."""


@dataclass(frozen=True)
class _Parts:
    transport: Transport
    store: EnvelopeStore
    admission: Admission
    gossip: Gossip
    catch_up: CatchUp
    finder: Finder


class Numbers:
    """Numbers for own batches. They grow over restarts without a file: they are the time in microseconds, or the last
    one and one more."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._last = 0

    def __call__(self) -> int:
        self._last = max(self._last + 1, int(self._now() * 1e6))
        return self._last


class Swarm:
    """The other nodes; `rl.protocols.Swarm`. Made by `open_swarm`."""

    def __init__(
        self,
        parts: _Parts,
        reputation: Reputation,
        contribution: Contribution,
        key: Ed25519PrivateKey,
        name: str,
        model: str,
        say: Say,
        now: Callable[[], float],
    ) -> None:
        self._parts = parts
        self._reputation = reputation
        self._contribution = contribution
        self._key = key
        self._name = name
        self._model = model
        self._say = say
        self._now = now
        self._sequence = Numbers(now)

    @property
    def transport(self) -> Transport:
        """The network below."""
        return self._parts.transport

    @property
    def finder(self) -> Finder:
        """To be told of addresses that somebody heard of."""
        return self._parts.finder

    async def share(self, groups: Sequence[ScoredGroup], number: int, /) -> int:
        """See `rl.protocols.Swarm`. Waits only while the outbox is full."""
        too_large: list[RolloutGroup] = []
        uses = self._contribution.news()

        def seal() -> list[Envelope]:
            return seal_round(
                self._key,
                self._name,
                number,
                self._model,
                [scored.group for scored in groups],
                self._sequence,
                self._now(),
                uses=uses,
                left_out=lambda group, error: too_large.append(group),
            )

        # In a thread: a large round is some 100 ms of compression and signatures.
        envelopes = await trio.to_thread.run_sync(seal)
        if too_large:
            self._say("warning", f"{len(too_large)} groups of round {number} are too large to be shared")
        for envelope in envelopes:
            self._parts.store.add(envelope)
            await self._parts.gossip.publish(envelope)
            self._contribution.sent(len(envelope.batch.groups))
            self._contribution.is_told(envelope.batch.uses)
        return len(envelopes)

    async def deliver(self, groups: Sequence[ScoredGroup], number: int, /) -> None:
        """`share` as soon as somebody is there to hear it. Returns when all of it has gone out."""
        await self._parts.gossip.heard()
        await self.share(groups, number)
        await self._parts.gossip.emptied()

    def trained(self, groups: Mapping[str, int]) -> None:
        """So many groups of each peer were trained on for the first time: told to them in a batch to come."""
        self._contribution.trained(groups)

    async def wait_for_peers(self, count: int, seconds: float) -> int:
        """Say that this node is ready to begin, and wait until so many connected peers are, or the time is over.

        Returns how many are. To be ready is a subscription, so those who come later hear of it too.
        """
        topic = ready_topic(self._name)
        await self.transport.subscribe(topic, _nothing_belongs_here, _ignore)
        with trio.move_on_after(seconds):
            while len(self.transport.subscribers(topic)) < count:
                await trio.sleep(_READY_SECONDS)
        return len(self.transport.subscribers(topic))

    def totals(self) -> Totals:
        """Counts up to now."""
        counts = self._parts.admission.counts
        return Totals(
            peers=len(self.transport.connections()),
            batches_sent=self._parts.gossip.sent,
            batches_received=counts.received,
            groups_admitted=counts.admitted,
            rejected=_words(counts.rejected),
        )

    def status(self) -> SwarmStatus:
        """All that there is to see, as plain data."""
        parts, counts = self._parts, self._parts.admission.counts
        mesh = parts.gossip.mesh()
        connections = {connection.peer: connection for connection in parts.transport.connections()}
        return SwarmStatus(
            swarm=self._name,
            peer_id=parts.transport.peer_id,
            addresses=tuple(parts.transport.addresses()),
            connected=len(connections),
            mesh=len(mesh),
            sent=parts.gossip.sent,
            received=counts.received,
            recovered=parts.catch_up.recovered,
            groups=counts.groups,
            admitted=counts.admitted,
            duplicates=counts.duplicates,
            rejected=_words(counts.rejected),
            waiting=parts.admission.waiting,
            unsent=parts.gossip.waiting,
            held=len(parts.store),
            contribution=self._contribution.told(),
            peers=tuple(self._rows(connections, mesh)),
        )

    def _rows(self, connections: Mapping[str, Connection], mesh: set[str]) -> list[PeerRow]:
        """The connected peers first, then those with a standing, then other origins."""
        standings = {standing.peer: standing for standing in self._reputation.standings()}
        by_peer = self._parts.admission.by_peer
        peers = dict.fromkeys([*connections, *standings, *by_peer, *self._contribution.reporters()])
        rows = []
        for peer in [*peers][:MAX_ROWS]:
            # Without a count as a use: what is looked at every second would never be forgotten.
            counts = by_peer.peek(peer) or Counts()
            standing = standings.get(peer)
            connection = connections.get(peer)
            admitted, trained = self._contribution.told_by(peer)
            rows.append(
                PeerRow(
                    peer=peer,
                    address=None if connection is None else connection.address,
                    connected=connection is not None,
                    in_mesh=peer in mesh,
                    score=0.0 if standing is None else standing.score,
                    banned_seconds=0.0 if standing is None else standing.banned,
                    batches=counts.received,
                    groups=counts.admitted,
                    rejected=_words(counts.rejected),
                    ours_admitted=admitted,
                    ours_trained=trained,
                )
            )
        return rows


def _nothing_belongs_here(forwarder: str, data: bytes) -> Verdict:
    return Verdict.REJECT


def _ignore(forwarder: str, data: bytes) -> None:
    """Nothing comes."""


@asynccontextmanager
async def open_swarm(
    open_transport: OpenTransport,
    key: Ed25519PrivateKey,
    network: NetworkSettings,
    admission: AdmissionSettings,
    tasks: Tasks | None,
    pool: Pool | None,
    *,
    round: Callable[[], int],  # noqa: A002  # this node's current round
    model: str,
    say: Say,
    reputation_path: Path | None = None,
    contribution_path: Path | None = None,
    peers_path: Path | None = None,
    own_task: Callable[[TaskRef], bool] = lambda ref: False,
    advantage: Literal["group", "mean"] = "group",
    pace: tuple[float, float] = (RATE, BURST),
    now: Callable[[], float] = time.time,
) -> AsyncIterator[Swarm]:
    """Take part in a swarm for the time of a block. `model` is told to others; without paths nothing is remembered.
    Without `tasks` or `pool` this node passes on what others send and looks at none of it: a relay. `pace`, own
    envelopes a second and at once, is for those whose receivers take more than is usual.

    What a part raises comes out as itself: nothing that a peer or the network does, but what `open_transport` and
    `pool` raise.
    """
    watcher = Watcher(reputation_path, now, say)
    reputation = watcher.reputation
    reputation.load()
    book = PeerBook(peers_path, say, now)
    book.load()
    async with open_transport(watcher) as transport:
        contribution = Contribution(contribution_path, transport.peer_id, say)
        contribution.load()
        keeper = Keeper(
            [
                Kept(reputation_path, reputation.dump, "bans are not kept"),
                Kept(contribution_path, contribution.dump, "what others used is not kept"),
            ],
            say,
        )
        watcher.on_ban = keeper.hurry
        store = EnvelopeStore()
        heard = shards_heard(transport.peer_id, network.shards, network.subscribe)
        gate = Admission(
            admission,
            network.swarm,
            transport.peer_id,
            network.allow,
            tasks,
            pool,
            reputation,
            round,
            now,
            on_accepted=store.add,
            own_task=own_task,
            shards=network.shards,
            heard=heard,
            advantage=advantage,
            contribution=contribution,
            say=say,
        )
        catch_up = CatchUp(
            transport,
            store,
            gate,
            watcher.misbehaved,
            lambda peer: reputation.banned(peer) > 0,
            shards=network.shards,
            heard=heard,
            now=now,
        )
        gossip = Gossip(transport, network.swarm, network.shards, network.subscribe, gate.check, pace)
        finder = Finder(transport, network, book, say, lambda peer: reputation.banned(peer) > 0, now=now)
        parts = _Parts(transport, store, gate, gossip, catch_up, finder)
        watcher.watch(parts)
        catch_up.serve()
        await gossip.subscribe()
        try:
            async with _background(
                gate.run, gossip.run, catch_up.run, finder.run, watcher.lift_bans, keeper.save_now_and_then
            ):
                yield Swarm(parts, reputation, contribution, key, network.swarm, model, say, now)
        finally:
            keeper.save()


@asynccontextmanager
async def _background(*services: Callable[[], Awaitable[NoReturn]]) -> AsyncIterator[None]:
    """Services that run for the time of a block. A single error comes out as itself, so that callers can name it."""
    try:
        async with trio.open_nursery() as nursery:
            for service in services:
                nursery.start_soon(service)
            yield
            nursery.cancel_scope.cancel()
        return
    except BaseExceptionGroup as group:
        if len(group.exceptions) != 1:
            raise
        (error,) = group.exceptions
    raise error


def _words(counter: Mapping[Reason, int]) -> dict[str, int]:
    return {str(reason): count for reason, count in counter.items()}
