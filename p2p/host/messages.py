"""Gossip messages and frames: made, signed, checked. The only module that knows libp2p's protobuf."""

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from libp2p.pubsub.pb import rpc_pb2

from p2p.host.settings import MAX_MESSAGE

MAX_ID = 64  # bytes of a message id: 38 of the peer and 8 of the counter in this protocol
MAX_TOPIC = 256
_PREFIX = b"libp2p-pubsub:"
_ED25519_ID = b"\x00\x24\x08\x01\x12\x20"


class Malformed(Exception):
    """A message that no honest peer passes on. The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Message:
    """A gossip message whose form is right; its signature has not been looked at."""

    origin: bytes
    topic: str
    data: bytes
    id: bytes
    signed: Any

    @classmethod
    def of(cls, message: Any) -> "Message":
        """Check the form. Raises Malformed."""
        if len(message.data) > MAX_MESSAGE:
            raise Malformed(f"a message of {len(message.data)} bytes")
        origin = message.from_id
        if len(origin) != 38 or not origin.startswith(_ED25519_ID):
            raise Malformed("a message from no Ed25519 peer")
        if message.key not in (b"", origin[2:]):
            raise Malformed("a message with another peer's key")
        if len(message.seqno) != 8 or len(message.topicIDs) != 1 or len(message.topicIDs[0]) > MAX_TOPIC:
            raise Malformed("a message with no counter or no single topic")
        # Not covered by the signature as it is checked here: passed on, they spoil it for others, who blame this node.
        message.DiscardUnknownFields()
        return cls(origin, message.topicIDs[0], message.data, origin + message.seqno, message)

    def verify(self) -> None:
        """Check the signature against the key in the origin's peer id. Raises Malformed."""
        message = self.signed
        if not message.signature:
            raise Malformed("an unsigned message")
        try:
            Ed25519PublicKey.from_public_bytes(self.origin[6:]).verify(message.signature, _payload(message))
        except (InvalidSignature, ValueError) as error:
            raise Malformed("a message with a bad signature") from error


def _payload(message: Any) -> bytes:
    bare = rpc_pb2.Message(
        from_id=message.from_id, data=message.data, seqno=message.seqno, topicIDs=list(message.topicIDs)
    )
    return _PREFIX + bytes(bare.SerializeToString())


class Author:
    """Makes this node's own messages."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.id = _ED25519_ID + key.public_key().public_bytes_raw()
        # Above every counter of an earlier run, so that no id comes twice.
        self._counter = itertools.count(time.time_ns())

    def message(self, topic: str, data: bytes) -> Message:
        """A signed message."""
        seqno = next(self._counter).to_bytes(8, "big")
        message = rpc_pb2.Message(from_id=self.id, data=data, seqno=seqno, topicIDs=[topic])
        message.signature = self._key.sign(_payload(message))
        return Message(self.id, topic, data, self.id + seqno, message)


def parse(frame: bytes) -> Any:
    """An RPC. Raises Malformed."""
    rpc = rpc_pb2.RPC()
    try:
        rpc.ParseFromString(frame)
    except Exception as error:
        raise Malformed("garbage where protobuf is due") from error
    return rpc


def _framed(rpc: Any) -> bytes:
    body = rpc.SerializeToString()
    length, prefix = len(body), bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + bytes(body)


def publish_frame(message: Message) -> bytes:
    """A frame with one message."""
    return _framed(rpc_pb2.RPC(publish=[message.signed]))


def subscribe_frame(topics: Iterable[str]) -> bytes:
    """A frame that announces subscriptions."""
    options = [rpc_pb2.RPC.SubOpts(subscribe=True, topicid=topic) for topic in topics]
    return _framed(rpc_pb2.RPC(subscriptions=options))


def graft_frame(topic: str) -> bytes:
    """A frame that takes a peer into the mesh."""
    return _control(graft=[rpc_pb2.ControlGraft(topicID=topic)])


def prune_frame(topic: str, backoff: int) -> bytes:
    """A frame that drops a peer from the mesh for some seconds at least."""
    return _control(prune=[rpc_pb2.ControlPrune(topicID=topic, backoff=backoff)])


def ihave_frame(topic: str, ids: Iterable[bytes]) -> bytes:
    """A frame that offers messages."""
    return _control(ihave=[rpc_pb2.ControlIHave(topicID=topic, messageIDs=list(ids))])


def iwant_frame(ids: Iterable[bytes]) -> bytes:
    """A frame that asks for messages."""
    return _control(iwant=[rpc_pb2.ControlIWant(messageIDs=list(ids))])


def idontwant_frame(ids: Iterable[bytes]) -> bytes:
    """A frame that tells what has come already."""
    return _control(idontwant=[rpc_pb2.ControlIDontWant(messageIDs=list(ids))])


def _control(**parts: Any) -> bytes:
    return _framed(rpc_pb2.RPC(control=rpc_pb2.ControlMessage(**parts)))
