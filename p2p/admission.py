"""What becomes of the batches of others, of which nothing is believed.

`Admission.check` is cheap and runs before a batch is passed on: form, signature, seen before, how often. After it,
`Admission.run` makes every task anew from its reference, compares the prompt, and scores the answers in the sandbox.

Blame. A forwarder answers for what anyone can see in the bytes, and for what it repeats. An origin answers for what its
signature proves. When and how often an envelope arrives is in the hands of those who pass it on, so it is never held
against its origin: nobody can get another node banned by replaying, delaying, damaging or duplicating its batches.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn, Protocol

import trio

from p2p.contribution import Contribution
from p2p.gossip import shard_of
from p2p.limits import Bucket, FairQueue, Recent
from p2p.reasons import Reason
from p2p.reputation import Reputation
from p2p.settings import AdmissionSettings
from p2p.transport import Verdict
from p2p.verification import Tasks, verify
from p2p.wire import Envelope, WireError, WireGroup, open_envelope
from rl.advantage import advantages
from rl.rollouts import RolloutGroup, ScoredGroup
from verifiers.base import TaskRef
from verifiers.codec import pack
from verifiers.sandbox import SandboxError

MAX_AHEAD = 2 * 3600.0
"""Seconds that a batch may be dated in the future: a time zone set wrong, not more."""

MAX_WAITING = 512
"""Batches that wait for their check, of all origins: at most 128 MiB, since they wait compressed."""

BUDGET_SECONDS = 60.0
"""An origin's share of the sandbox is a mean over about so long: enough for the start of a worker."""

_PATIENCE = 2, 4
"""An origin's batches beyond its rate are refused; a peer that passes on more than so many times the rate and the burst
is blamed. An honest one refuses them itself, at about the same rate."""

_REPEATS_PER_SECOND, _REPEATS = 1.0, 50.0
"""Copies that a peer may send of what it sent before. An honest one sends none, except after a restart."""

_ENVELOPES, _COPIES, _REFUSED, _GROUPS = 50_000, 10_000, 10_000, 100_000
_PEERS, _NEIGHBOURS, _DELIVERED, _PATIENT = 1024, 256, 1024, 32


class Pool(Protocol):
    """Where admitted groups go."""

    async def add(self, groups: Sequence[ScoredGroup]) -> None:
        """Keep these groups; returns when they are safe."""
        ...


@dataclass(slots=True)
class Counts:
    """What came, and what became of it.

    `received` counts batches that were taken in, and `groups` the groups in them; `admitted` of those went to the pool.
    `duplicates` counts batches and groups that had been there before, which is nobody's fault. `rejected` counts
    batches that `check` refused and, one by one, groups that failed later.
    """

    received: int = 0
    groups: int = 0
    admitted: int = 0
    duplicates: int = 0
    rejected: Counter[Reason] = field(default_factory=Counter)


class _Origin:
    """Limits on what one node signs."""

    def __init__(self, settings: AdmissionSettings, now: float) -> None:
        self.batches = Bucket(settings.batches_per_second, settings.burst, now)
        share = settings.seconds_per_second
        self.seconds = Bucket(share, share * BUDGET_SECONDS, now)
        self.patience = Recent[str, Bucket](_PATIENT)


class _Neighbour:
    """What one peer passed on of late."""

    def __init__(self, now: float) -> None:
        self.delivered = Recent[bytes, None](_DELIVERED)
        self.repeats = Bucket(_REPEATS_PER_SECOND, _REPEATS, now)


class Admission:
    """Takes envelopes of others, as bytes, and fills the pool.

    `counts` is for all of them, `by_peer` for each peer of late: the origin where a signature proves it, else whoever
    passed it on.
    """

    def __init__(
        self,
        settings: AdmissionSettings,
        swarm: str,
        own: str,
        allow: Collection[str],
        tasks: Tasks | None,
        pool: Pool | None,
        reputation: Reputation,
        round: Callable[[], int],  # noqa: A002  # this node's current round
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = trio.current_time,
        *,
        on_accepted: Callable[[Envelope], None] = lambda envelope: None,
        own_task: Callable[[TaskRef], bool] = lambda ref: False,
        shards: int = 1,
        heard: Collection[int] = (0,),
        advantage: Literal["group", "mean"] = "group",
        contribution: Contribution | None = None,
        say: Callable[[str, str], None] = lambda level, text: None,
    ) -> None:
        """`allow` empty means everybody. Without `tasks` or `pool` batches are judged and passed on, and none of their
        groups is looked at. `own_task` says whether a reference of the verifier `command` is one that this node's own
        mix makes, seed and index aside: peers run the owner's programs with no other parameters. Only what nodes of the
        shards `heard`, out of `shards`, have made is taken.
        """
        self._settings = settings
        self._swarm = swarm
        self._own = own
        self._allow = frozenset(allow)
        self._tasks = tasks
        self._pool = pool
        self._looks = tasks is not None and pool is not None
        self._reputation = reputation
        self._round = round
        self._now = now
        self._clock = clock
        self._on_accepted = on_accepted
        self._own_task = own_task
        self._shards = shards
        self._heard = frozenset(heard)
        self._advantage = advantage
        self._contribution = contribution or Contribution(None, own)
        self._say = say
        self._queue = FairQueue[bytes](settings.queue, MAX_WAITING)
        self._arrived = trio.Event()
        self._origins = Recent[str, _Origin](_PEERS)
        self._neighbours = Recent[str, _Neighbour](_NEIGHBOURS)
        self._ids = Recent[bytes, None](_ENVELOPES)
        self._sequences = Recent[tuple[str, int], bytes](_ENVELOPES)
        self._copies = Recent[bytes, None](_COPIES)
        self._refused = Recent[bytes, None](_REFUSED)
        self._admitted = Recent[bytes, None](_GROUPS)
        self._ill = False
        self.counts = Counts()
        self.by_peer = Recent[str, Counts](_PEERS)

    @property
    def waiting(self) -> int:
        """Batches that wait for their check."""
        return len(self._queue)

    def knows(self, envelope_id: bytes) -> bool:
        """Whether the envelope of this id need not be asked for: it was taken, or refused for good."""
        return envelope_id in self._ids or envelope_id in self._refused

    def forget(self, neighbour: str) -> None:
        """The peer is gone. One that comes back may have been restarted, and then passes things on again."""
        self._neighbours.pop(neighbour)

    def check(self, data: bytes, forwarder: str, *, requested: bool = False) -> Verdict:
        """Judge one envelope that `forwarder` passed on, and queue it if it is new and good.

        `requested` is for those that this node asked for (catch-up): they may be many at once, and seen before.
        """
        if self._reputation.banned(forwarder):
            self._count(forwarder, Reason.BANNED)
            return Verdict.IGNORE
        copy = hashlib.sha256(data).digest()
        if copy in self._copies:
            return self._again(forwarder, copy, requested)
        try:
            envelope = open_envelope(data)
        except WireError as error:
            self.blame(forwarder, error.reason)
            return Verdict.REJECT
        if envelope.origin == self._own:
            # Of before a restart, perhaps: catch-up need not ask for it again.
            self._refused.put(envelope.id, None)
            self._copies.put(copy, None)
            return Verdict.IGNORE
        if envelope.batch.swarm != self._swarm:
            # A node of another swarm may be asked by catch-up before it is known to be one, and answers honestly.
            if requested:
                self._refused.put(envelope.id, None)
                return Verdict.IGNORE
            self.blame(forwarder, Reason.WRONG_SWARM)
            return Verdict.REJECT
        self._copies.put(copy, None)
        return self._judge(envelope, forwarder, copy, requested)

    async def run(self) -> NoReturn:
        """Check what waits, for ever: origins take turns, and one that has used up its share of the sandbox waits."""
        tasks, pool = self._tasks, self._pool
        if tasks is None or pool is None:
            await trio.sleep_forever()
            raise AssertionError("the sleep above never ends")
        while True:
            await self._admit(await self._next(), tasks, pool)
            # A batch of nothing but duplicates waits for nothing.
            await trio.lowlevel.checkpoint()

    def _judge(self, envelope: Envelope, forwarder: str, copy: bytes, requested: bool) -> Verdict:
        """What only those see who know the node's state: none of it is the forwarder's fault, but for a flood."""
        origin, place = envelope.origin, (envelope.origin, envelope.batch.sequence)
        if (reason := self._unwelcome(envelope)) is not None:
            self._refused.put(envelope.id, None)
            self._count(origin, reason)
            if not requested:
                self._lose_patience(origin, forwarder)
            return Verdict.IGNORE
        before = self._sequences.get(place)
        if before == envelope.id or envelope.id in self._refused:
            return self._again(forwarder, copy, requested)
        if before is not None:
            # Blamed once: those who replay the pair must not add to it.
            self._refused.put(envelope.id, None)
            self.blame(origin, Reason.EQUIVOCATION)
            return Verdict.IGNORE
        if not requested and not self._in_time(origin, forwarder):
            # Not remembered: it may come again when there is room.
            self._copies.pop(copy)
            return Verdict.IGNORE
        if requested and self._queue.length(origin) >= max(1, self._settings.queue // 2):
            # The other half is for what it shares now. What was missed can wait, and is handed over again.
            self._copies.pop(copy)
            return Verdict.IGNORE
        fits, loser = self._queue.put(origin, envelope.data) if self._looks else (True, None)
        if not fits:
            self._copies.pop(copy)
            if not requested:
                self._count(origin, Reason.OVERLOADED)
            return Verdict.IGNORE
        if loser is not None:
            self._count(loser, Reason.OVERLOADED)
        self._ids.put(envelope.id, None)
        self._sequences.put(place, envelope.id)
        if not requested:  # what catch-up was faster to bring may come by gossip still, once
            self._neighbour(forwarder).delivered.put(copy, None)
        for counts in (self.counts, self._counts(origin)):
            counts.received += 1
            counts.groups += len(envelope.batch.groups)
        self._arrived.set()
        self._on_accepted(envelope)
        return Verdict.ACCEPT

    def _unwelcome(self, envelope: Envelope) -> Reason | None:
        if self._allow and envelope.origin not in self._allow:
            return Reason.NOT_ALLOWED
        # A node that published on all topics would be heard by all nodes, however large the swarm is.
        if self._shards > 1 and shard_of(envelope.origin, self._shards) not in self._heard:
            return Reason.WRONG_SHARD
        if self._reputation.banned(envelope.origin):
            return Reason.BANNED
        age = self._now() - envelope.batch.created
        if age > self._settings.max_age_seconds or age < -MAX_AHEAD:
            return Reason.STALE
        return None

    def _again(self, forwarder: str, copy: bytes, requested: bool) -> Verdict:
        """A duplicate. One peer's copies of what it sent before are a replay when they are many."""
        for counts in (self.counts, self._counts(forwarder)):
            counts.duplicates += 1
        if not requested:
            neighbour = self._neighbour(forwarder)
            if copy not in neighbour.delivered:
                neighbour.delivered.put(copy, None)
            elif not neighbour.repeats.take(self._clock()):
                self.blame(forwarder, Reason.REPLAY)
        return Verdict.IGNORE

    def _in_time(self, origin: str, forwarder: str) -> bool:
        """Whether the origin's rate allows one batch more. Who passes on far too many is blamed."""
        if self._origin(origin).batches.take(self._clock()):
            return True
        self._count(origin, Reason.RATE)
        self._lose_patience(origin, forwarder)
        return False

    def _lose_patience(self, origin: str, forwarder: str) -> None:
        """The forwarder brought one of the origin's batches in vain. It is blamed for far too many of them."""
        limits, now = self._origin(origin), self._clock()
        patience = limits.patience.get(forwarder)
        if patience is None:
            rate, burst = _PATIENCE
            patience = Bucket(rate * self._settings.batches_per_second, burst * self._settings.burst, now)
            limits.patience.put(forwarder, patience)
        if not patience.take(now):
            self._reputation.offence(forwarder, Reason.RATE)
            self._drop_banned(forwarder)

    async def _next(self) -> bytes:
        while True:
            now, pause = self._clock(), float("inf")
            for origin in self._queue.sources():
                wait = self._origin(origin).seconds.wait(now)
                if wait == 0:
                    return self._queue.take(origin)
                pause = min(pause, wait)
            self._arrived = trio.Event()
            with trio.move_on_after(pause):
                await self._arrived.wait()

    async def _admit(self, data: bytes, tasks: Tasks, pool: Pool) -> None:
        """Check the groups of one batch; those that are right go to the pool together."""
        envelope = open_envelope(data)
        origin, groups = envelope.origin, envelope.batch.groups
        scored: list[ScoredGroup] = []
        known = 0
        for place, group in enumerate(groups):
            if self._reputation.banned(origin):
                self._count(origin, Reason.BANNED, len(groups) - place)
                break
            if self._origin(origin).seconds.wait(self._clock()) > 0:
                self._count(origin, Reason.CAPPED, len(groups) - place)
                break
            key = _group_key(origin, group)
            if key in self._admitted:
                known += 1
                for counts in (self.counts, self._counts(origin)):
                    counts.duplicates += 1
                continue
            verified = await self._verify(origin, group, tasks)
            if isinstance(verified, Reason):
                self.blame(origin, verified)
                continue
            self._admitted.put(key, None)
            scored.append(verified)
        if scored:
            await pool.add(scored)
            self._reputation.credit(origin, len(scored))
            self._contribution.admitted(origin, len(scored))
            for counts in (self.counts, self._counts(origin)):
                counts.admitted += len(scored)
        # Of those alone who do what a node does: a key costs nothing, and a claim neither.
        if scored or known:
            self._contribution.hear(origin, envelope.batch.uses)

    async def _verify(self, origin: str, group: WireGroup, tasks: Tasks) -> ScoredGroup | Reason:
        """The group with this node's own task and rewards, or why not."""
        begun = self._clock()
        try:
            found = await verify(group, tasks, self._settings.max_completion, self._own_task)
        except SandboxError as error:
            # This machine's own trouble, and perhaps a long wait: nothing of it is charged.
            begun = self._clock()
            if not self._ill:
                self._say("error", f"rollouts of others cannot be checked: {error}")
            self._ill = True
            return Reason.OVERLOADED
        finally:
            self._origin(origin).seconds.charge(self._clock(), self._clock() - begun)
        if isinstance(found, Reason):
            return found
        self._ill = False
        rollouts = RolloutGroup(found.task, group.completions, group.policy_step)
        return ScoredGroup(rollouts, origin, self._round(), found.rewards, advantages(found.rewards, self._advantage))

    def blame(self, peer: str, reason: Reason) -> None:
        """Count something that a peer did, and hold it against it."""
        self._count(peer, reason)
        self._reputation.offence(peer, reason)
        self._drop_banned(peer)

    def _drop_banned(self, peer: str) -> None:
        if self._queue.length(peer) and self._reputation.banned(peer):
            self._count(peer, Reason.BANNED, self._queue.drop(peer))

    def _count(self, peer: str, reason: Reason, count: int = 1) -> None:
        self.counts.rejected[reason] += count
        self._counts(peer).rejected[reason] += count

    def _counts(self, peer: str) -> Counts:
        counts = self.by_peer.get(peer)
        if counts is None:
            counts = Counts()
            self.by_peer.put(peer, counts)
        return counts

    def _origin(self, peer: str) -> _Origin:
        origin = self._origins.get(peer)
        if origin is None:
            origin = _Origin(self._settings, self._clock())
            self._origins.put(peer, origin)
        return origin

    def _neighbour(self, peer: str) -> _Neighbour:
        neighbour = self._neighbours.get(peer)
        if neighbour is None:
            neighbour = _Neighbour(self._clock())
            self._neighbours.put(peer, neighbour)
        return neighbour


def _group_key(origin: str, group: WireGroup) -> bytes:
    """Names a group by what the pool tells groups apart by: its origin, the task and the answers."""
    ref = group.ref
    answers = [[completion.text, completion.finished] for completion in group.completions]
    named = [origin, ref.verifier, ref.version, ref.config, ref.seed, ref.index, answers]
    return hashlib.sha256(pack(named)).digest()[:16]
