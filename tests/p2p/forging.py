"""Batches for tests: good ones, and envelopes with anything at all in them, signed as if they were good."""

import zlib
from collections.abc import Sequence
from typing import Any

import msgpack
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.ids import peer_id_of
from p2p.wire import SIGNED, VERSION, Batch, WireGroup, encode_batch
from rl.rollouts import Completion
from verifiers.base import TaskRef

NOW = 1_800_000_000.0
"""The date on batches, where nothing else is said."""


def key(number: int) -> Ed25519PrivateKey:
    """One of many fixed keys."""
    return Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))


def peer(number: int) -> str:
    """The peer id of `key(number)`."""
    return peer_id_of(key(number).public_key().public_bytes_raw())


def ref(index: int = 0, config: str = '{"dataset":"chain_sum"}', verifier: str = "fake", version: str = "1") -> TaskRef:
    """A reference to a task of `fakes.FakeTasks`."""
    return TaskRef(verifier, version, config, 7, index)


def group(
    index: int = 0, answers: Sequence[str] = ("right", "wrong"), prompt: str | None = None, at: TaskRef | None = None
) -> WireGroup:
    """A group for task number `index`, with the right prompt if no other is given."""
    task = at or ref(index)
    text = prompt if prompt is not None else f"question {task.index}"
    return WireGroup(task, text, tuple(Completion(answer, True) for answer in answers), 3)


def batch(sequence: int = 1, groups: Sequence[WireGroup] | None = None, **changes: Any) -> Batch:
    """A batch of one group, or of these."""
    fields: dict[str, Any] = {"swarm": "main", "created": NOW, "round": 5, "model": "tiny"} | changes
    return Batch(sequence=sequence, groups=tuple(groups or [group(sequence)]), **fields)


def tree(of: Batch | None = None) -> dict[str, Any]:
    """A batch as the maps and arrays that travel, to be spoiled."""
    plain: dict[str, Any] = msgpack.unpackb(encode_batch(of or batch()))
    return plain


def forge(content: Any, signer: Ed25519PrivateKey | None = None) -> bytes:
    """An envelope, rightly signed, around a tree, or around bytes as they are."""
    plain = content if isinstance(content, bytes) else msgpack.packb(content)
    return frame(zlib.compress(plain), signer)


def frame(payload: bytes, signer: Ed25519PrivateKey | None = None) -> bytes:
    """An envelope, rightly signed, around a payload that need not be compressed."""
    signer = signer or key(1)
    public = signer.public_key().public_bytes_raw()
    return bytes(msgpack.packb([VERSION, public, payload, signer.sign(SIGNED + payload)]))
