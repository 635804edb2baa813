"""GossipSub 1.1 and 1.2 without its optional parts: who is in which mesh, and what becomes of each message.

The rules only: `pubsub` owns streams and tasks. py-libp2p's router is not used, since its faults are spread over all
of it: it raises on garbage, writes one stream from several tasks, loses messages at full queues without a word, keeps
whole messages in unbounded tables and leaves peers in the mesh whatever their score is. All handling of a message is
synchronous here, from the look whether it was seen to the hand-over, so no message is delivered twice.
"""

import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import trio

from p2p.host import scores
from p2p.host.cache import Link, Recent, Seen
from p2p.host.messages import (
    MAX_ID,
    MAX_TOPIC,
    Malformed,
    Message,
    graft_frame,
    idontwant_frame,
    ihave_frame,
    iwant_frame,
    prune_frame,
    publish_frame,
    subscribe_frame,
)
from p2p.transport import Deliver, Validate, Verdict

logger = logging.getLogger(__name__)

_DEGREE, _DEGREE_LOW, _DEGREE_HIGH = 6, 4, 8
_KEPT_BEST = 4  # when the mesh is too large, the peers with the best scores stay in any case
_KEPT_OUTBOUND = 2  # and some that this node chose to dial
_GOSSIP_PEERS, _GOSSIP_FRACTION = 6, 0.25
_BACKOFF = 60
_MAX_BACKOFF = 3600.0
_MAX_ASKED = 128  # messages asked of one peer between two heartbeats
_MAX_OFFER = 200
_MAX_ANSWER = 4 * 1024 * 1024  # bytes sent to one peer on its asking, between two heartbeats
_MAX_TOPICS = 128
_LARGE = 2048  # bytes from which on telling others that a message has come already is worth a frame
_UNWANTED_BEATS = 3
_MAX_UNWANTED = 1000
_PROMISE_SECONDS = 5.0
_MAX_PROMISES = 10_000
_MAX_CONTROL = 20_000  # entries and ids of one peer's control messages between two heartbeats; 10 ms of work
_CONTROL_FLOOD = 5 * _MAX_CONTROL
_MAX_USELESS = 5_000  # messages of one peer that are of no use, between two heartbeats


@dataclass
class Topic:
    """A topic that this node has joined."""

    validate: Validate
    deliver: Deliver
    mesh: set[str] = field(default_factory=set)


class Gossip:
    """The router. `misbehaved(peer, what)` is told of broken rules; `refused(origin)` says whose messages to drop."""

    def __init__(
        self,
        own: str,
        name: Callable[[bytes], str],
        marks: scores.Scores,
        misbehaved: Callable[[str, str], None],
        refused: Callable[[str], bool],
    ) -> None:
        self.own = own
        self.links: dict[str, Link] = {}
        self.topics: dict[str, Topic] = {}
        self.marks = marks
        self._name = name
        self._misbehaved = misbehaved
        self._refused = refused
        self._seen = Seen()
        self._recent = Recent()
        self._beat = 0
        self._promises: dict[bytes, float] = {}  # asked for, not to be asked for again until then

    # Peers

    def subscribe(self, topic: str, validate: Validate, deliver: Deliver) -> None:
        """Join a topic."""
        known = self.topics.get(topic)
        self.topics[topic] = Topic(validate, deliver, set() if known is None else known.mesh)
        if known is None:
            for link in self.links.values():
                if link.writable:
                    link.outbox.push(subscribe_frame([topic]), urgent=True)
            self._fill(topic)

    def up(self, link: Link) -> None:
        """A peer can be written to."""
        link.writable = True
        if self.topics:
            link.outbox.push(subscribe_frame(self.topics), urgent=True)
        for topic in self.topics:
            self._fill(topic)

    def down(self, link: Link) -> None:
        """A peer can no longer be written to."""
        link.writable = False
        link.outbox.clear()
        self.silent(link)

    def silent(self, link: Link) -> None:
        """A peer's subscriptions are no longer known, or it is gone."""
        for topic in self.topics.values():
            topic.mesh.discard(link.peer)

    def subscribers(self, topic: str) -> list[Link]:
        """Peers that can be written to and are subscribed."""
        return [link for link in self.links.values() if link.writable and topic in link.topics]

    # Messages

    def receive(self, link: Link, raw: Any) -> None:
        """A message from a peer: check, hand over, pass on."""
        try:
            message = Message.of(raw)
            topic = self.topics.get(message.topic)
            if topic is None:
                self._useless(link)
                return
            self._promises.pop(message.id, None)
            if message.id in self._seen:
                self._useless(link)
                return
            origin = self._name(message.origin)
            if origin == self.own or self._refused(origin):
                self._useless(link)
                return
            message.verify()
        except Malformed as error:
            self.marks[link.peer].invalid += 1
            self._misbehaved(link.peer, str(error))
            return
        self._seen.add(message.id, trio.current_time())
        if len(message.data) >= _LARGE:
            self._tell_not_wanted(message.id, topic, link.peer)
        verdict = self._judge(topic, link.peer, message.data)
        if verdict is Verdict.ACCEPT:
            self.marks[link.peer].first += 1
            self._pass_on(message, topic, {link.peer, origin})
        elif verdict is Verdict.REJECT:
            self.marks[link.peer].invalid += 1

    def _useless(self, link: Link) -> None:
        """A message that was here before, or that this node has no use for. Raises Malformed far beyond any need."""
        link.useless += 1
        if link.useless > _MAX_USELESS:
            raise Malformed("a flood of messages that are of no use")

    def _judge(self, topic: Topic, peer: str, data: bytes) -> Verdict:
        try:
            verdict = topic.validate(peer, data)
            if verdict is Verdict.ACCEPT:
                topic.deliver(peer, data)
        except Exception:
            logger.exception("handling a gossip message failed; it is not passed on")
            return Verdict.IGNORE
        return verdict

    def _pass_on(self, message: Message, topic: Topic, but: set[str]) -> None:
        frame = publish_frame(message)
        self._recent.put(message.id, message.topic, frame)
        for peer in topic.mesh - but:
            link = self.links[peer]
            if message.id not in link.unwanted and not link.outbox.push(frame):
                link.missed.append((message.topic, message.id))  # offered again when there is room

    def _tell_not_wanted(self, message_id: bytes, topic: Topic, sender: str) -> None:
        frame = idontwant_frame([message_id])
        for peer in topic.mesh:
            if peer != sender and self.links[peer].protocol.endswith("/1.2.0"):
                self.links[peer].outbox.push(frame, urgent=True)

    def own_message(self, message: Message) -> tuple[bytes, list[Link]]:
        """This node's own message: the frame, and whom it goes to."""
        frame = publish_frame(message)
        self._seen.add(message.id, trio.current_time())
        self._recent.put(message.id, message.topic, frame)
        topic = self.topics.get(message.topic)
        mesh = [] if topic is None else [self.links[peer] for peer in topic.mesh]
        if len(mesh) < _DEGREE_LOW:
            others = [link for link in self.subscribers(message.topic) if link not in mesh and self._good(link)]
            mesh += random.sample(others, min(len(others), _DEGREE - len(mesh)))
        return frame, mesh

    # Control

    def subscription(self, link: Link, topic: Any, joins: bool) -> None:
        """A peer joins or leaves a topic. Raises Malformed."""
        if not isinstance(topic, str) or len(topic) > MAX_TOPIC or not topic.isprintable():
            raise Malformed("a topic name that is no sane text")
        if not joins:
            link.topics.discard(topic)
            if topic in self.topics:
                self.topics[topic].mesh.discard(link.peer)
        elif len(link.topics) < _MAX_TOPICS:
            link.topics.add(topic)
            if topic in self.topics:
                self._fill(topic)

    def control(self, link: Link, control: Any) -> None:
        """A peer's control message; what is beyond any need in it is not looked at. Raises Malformed."""
        link.control += _work(control)
        if link.control > _CONTROL_FLOOD:
            raise Malformed("a flood of control messages")
        if link.control > _MAX_CONTROL:
            return
        score = self.marks.score(link.peer)
        for graft in control.graft:
            self._grafted(link, graft.topicID, score)
        for prune in control.prune:
            self._pruned(link, prune.topicID, prune.backoff)
        if score >= scores.GOSSIP:
            for ihave in control.ihave:
                self._offered(link, ihave.topicID, ihave.messageIDs)
            for iwant in control.iwant:
                self._asked(link, iwant.messageIDs)
        for unwanted in control.idontwant:
            for message_id in unwanted.messageIDs[:_MAX_UNWANTED]:
                link.unwanted[bytes(message_id)] = self._beat + _UNWANTED_BEATS
        while len(link.unwanted) > _MAX_UNWANTED:
            link.unwanted.popitem(last=False)

    def _grafted(self, link: Link, name: str, score: float) -> None:
        topic = self.topics.get(name)
        if topic is None or link.peer in topic.mesh:
            return
        now = trio.current_time()
        if link.backoff.get(name, 0.0) > now:
            self.marks[link.peer].behaviour += 1
            self._prune(link, name)
        elif score < scores.MESH or (len(topic.mesh) >= _DEGREE_HIGH and not link.outbound):
            self._prune(link, name)
        elif link.writable:
            link.topics.add(name)
            topic.mesh.add(link.peer)

    def _pruned(self, link: Link, name: str, backoff: int) -> None:
        topic = self.topics.get(name)
        if topic is not None:
            topic.mesh.discard(link.peer)
            link.backoff[name] = trio.current_time() + min(float(backoff or _BACKOFF), _MAX_BACKOFF)

    def _offered(self, link: Link, name: str, ids: Iterable[Any]) -> None:
        if name not in self.topics:
            return
        now, wanted = trio.current_time(), []
        for raw in ids:
            if link.asked >= _MAX_ASKED or len(self._promises) >= _MAX_PROMISES:
                break
            message_id = bytes(raw)
            if message_id not in self._seen and message_id not in self._promises:
                self._promises[message_id] = now + _PROMISE_SECONDS
                wanted.append(message_id)
                link.asked += 1
        if wanted:
            link.outbox.push(iwant_frame(wanted), urgent=True)

    def _asked(self, link: Link, ids: Iterable[Any]) -> None:
        for raw in ids:
            frame = self._recent.get(bytes(raw))
            if frame is None:
                continue
            if link.answered + len(frame) > _MAX_ANSWER:
                return
            link.answered += len(frame)
            link.outbox.push(frame)

    # Meshes

    def heartbeat(self) -> None:
        """Once a second: mend the meshes, offer messages, let marks fade."""
        now = trio.current_time()
        self._beat += 1
        for name, topic in self.topics.items():
            for peer in [peer for peer in topic.mesh if self.marks.score(peer) < scores.MESH]:
                logger.debug("%s leaves the mesh of %s for its score", peer, name)
                self._prune(self.links[peer], name)
            self._fill(name)
            if len(topic.mesh) > _DEGREE_HIGH:
                self._thin(name, topic)
            self._offer(name, topic)
        for message_id in [key for key, until in self._promises.items() if until < now]:
            del self._promises[message_id]
        for link in self.links.values():
            self._offer_missed(link)
            link.asked = link.answered = link.control = link.useless = 0
            link.scolded = False
            link.backoff = {topic: until for topic, until in link.backoff.items() if until > now}
            while link.unwanted and next(iter(link.unwanted.values())) < self._beat:
                link.unwanted.popitem(last=False)
        self._recent.beat()
        self.marks.fade()

    def _good(self, link: Link) -> bool:
        return self.marks.score(link.peer) >= scores.MESH

    def _fill(self, name: str) -> None:
        topic = self.topics[name]
        if len(topic.mesh) >= _DEGREE_LOW:
            return
        now = trio.current_time()
        others = [
            link
            for link in self.subscribers(name)
            if link.peer not in topic.mesh and link.backoff.get(name, 0.0) <= now and self._good(link)
        ]
        for link in random.sample(others, min(len(others), _DEGREE - len(topic.mesh))):
            topic.mesh.add(link.peer)
            link.outbox.push(graft_frame(name), urgent=True)

    def _thin(self, name: str, topic: Topic) -> None:
        peers = random.sample(sorted(topic.mesh), len(topic.mesh))
        peers.sort(key=self.marks.score, reverse=True)
        best, rest = peers[:_KEPT_BEST], peers[_KEPT_BEST:]
        rest.sort(key=lambda peer: not self.links[peer].outbound)
        chosen, rest = rest[:_KEPT_OUTBOUND], random.sample(rest[_KEPT_OUTBOUND:], len(rest) - _KEPT_OUTBOUND)
        for peer in (best + chosen + rest)[_DEGREE:]:
            self._prune(self.links[peer], name)

    def _prune(self, link: Link, name: str) -> None:
        self.topics[name].mesh.discard(link.peer)
        link.backoff[name] = trio.current_time() + _BACKOFF
        link.outbox.push(prune_frame(name, _BACKOFF), urgent=True)

    def _offer_missed(self, link: Link) -> None:
        missed: dict[str, list[bytes]] = {}
        for name, message_id in link.missed:
            missed.setdefault(name, []).append(message_id)
        link.missed.clear()
        for name, ids in missed.items():
            link.outbox.push(ihave_frame(name, ids))

    def _offer(self, name: str, topic: Topic) -> None:
        ids = list(self._recent.offers(name))[:_MAX_OFFER]
        others = [
            link
            for link in self.subscribers(name)
            if link.peer not in topic.mesh and self.marks.score(link.peer) >= scores.GOSSIP
        ]
        count = max(_GOSSIP_PEERS, int(_GOSSIP_FRACTION * len(others)))
        if ids:
            for link in random.sample(others, min(len(others), count)):
                link.outbox.push(ihave_frame(name, ids))


def _work(control: Any) -> int:
    """Entries and ids in a control message, not looked at one by one where there are too many. Raises Malformed."""
    lists = control.ihave, control.iwant, control.idontwant
    work = len(control.graft) + len(control.prune) + sum(map(len, lists))
    if work <= _MAX_CONTROL:
        ids = [entry.messageIDs for part in lists for entry in part]
        work += sum(map(len, ids))
        # Looked at whatever the sender's score is, so that who sends nonsense only is blamed each time.
        if work <= _MAX_CONTROL and not all(0 < len(id_) <= MAX_ID for part in ids for id_ in part):
            raise Malformed("a message id of no sane length")
    return work
