"""Batches of rollouts as they travel: canonical bytes, compressed, in an envelope signed by the node that made them.

An envelope proves its origin whoever passes it on. Nothing here believes a word of it: `open_envelope` checks form and
signature, the rest is admission's. docs/protocol.md describes every byte.
"""

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import ValidationError

from p2p.canonical import CanonicalError, TooManyError, decode, encode
from p2p.ids import KEY_BYTES, peer_id_of, public_key_of
from p2p.reasons import Reason
from p2p.schema import (
    MAX_DEPTH,
    MAX_GROUPS,
    MAX_NAME,
    MAX_VALUES,
    BatchBody,
    CompletionBody,
    GroupBody,
    TaskBody,
    UseBody,
    check_totals,
    pack_logprobs,
    unpack_logprobs,
)
from rl.rollouts import Completion, RolloutGroup
from verifiers.base import TaskRef

VERSION = 2
"""Of the protocol. Another one means other bytes, and another topic. Batches of version 1 had no `uses`."""

MAX_ENVELOPE = 256 * 2**10
"""Bytes of an envelope."""

MAX_BATCH = 2 * 2**20
"""Bytes of a batch when decompressed. Bounds what one envelope costs its receivers to about 20 milliseconds."""

SIGNED = b"swarmnode/2/envelope\0"
"""Stands before the payload in what is signed, so that no signature made for something else passes for one of these."""

IDENTIFIED = b"swarmnode/2/batch\0"
"""Stands before key and batch in what is hashed for the id."""

_SIGNATURE_BYTES = 64
_LEVEL = 6
_DETAIL = 200


class WireError(Exception):
    """Bytes that are not an envelope of this protocol. `reason` is for counters, the message for the log."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class WireGroup:
    """A rollout group as its sender tells it. Completions have no `tokens`; `logprobs`, if any, are finite."""

    ref: TaskRef
    prompt: str
    completions: tuple[Completion, ...]
    policy_step: int


@dataclass(frozen=True, slots=True)
class Use:
    """What the sender says it did with the groups of node `peer`, in all the time that it has known it."""

    peer: str
    admitted: int
    trained: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One node's groups of one round, or a part of them.

    `sequence` is the sender's own: never used twice by one key, and growing. `created` is in unix seconds by the
    sender's clock, to the millisecond. `uses` may tell of any node, each once; it is kept in the order of their keys.
    """

    swarm: str
    sequence: int
    created: float
    round: int
    model: str
    groups: tuple[WireGroup, ...]
    uses: tuple[Use, ...] = ()


@dataclass(frozen=True, slots=True)
class Envelope:
    """A checked envelope. `data` is what travels; `id` (32 bytes) names key and batch, however they are compressed."""

    data: bytes
    id: bytes
    origin: str
    batch: Batch


def open_envelope(data: bytes) -> Envelope:
    """The envelope in `data`, whose signature and form are right. Raises WireError, and nothing else, for any bytes.

    The cheap checks come first: size, frame, version, signature, then decompression, form and schema of the batch.
    """
    key, payload, signature = _opened(data)
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, SIGNED + payload)
    # ValueError comes of 32 bytes that are no point of the curve.
    except (InvalidSignature, ValueError) as error:
        raise WireError(Reason.SIGNATURE, "not a signature of this key over this payload") from error
    plain = _decompressed(payload)
    return Envelope(data, _id(key, plain), peer_id_of(key), decode_batch(plain))


def seal(key: Ed25519PrivateKey, batch: Batch) -> Envelope:
    """`batch` in an envelope signed with `key`. Lone surrogates in completions become question marks.

    Raises WireError where a receiver would: too large, or out of a bound of the schema.
    """
    plain = encode_batch(batch)
    public = key.public_key().public_bytes_raw()
    payload = zlib.compress(plain, _LEVEL)
    data = encode([VERSION, public, payload, key.sign(SIGNED + payload)])
    if len(data) > MAX_ENVELOPE:
        raise WireError(Reason.TOO_LARGE, f"an envelope of {len(data)} bytes, {MAX_ENVELOPE} are allowed")
    return Envelope(data, _id(public, plain), peer_id_of(public), decode_batch(plain))


def seal_round(
    key: Ed25519PrivateKey,
    swarm: str,
    round: int,  # noqa: A002  # the batch's own word for it
    model: str,
    groups: Sequence[RolloutGroup],
    sequence: Callable[[], int],
    now: float,
    *,
    uses: Sequence[Use] = (),
    logprobs: bool = False,
    left_out: Callable[[RolloutGroup, WireError], None] | None = None,
) -> list[Envelope]:
    """A round's groups, in order, in as few envelopes as simple halving finds.

    A group that cannot be sent, for its size or else, is left out, `left_out` is told, and nothing is raised. Log-probs
    travel only if asked for: they do not compress, and mean something only to a node with the same tokenizer. Takes
    milliseconds for each 100 kB of text; for more than that, use a thread. `uses` travel in the first envelope
    that has room for them.
    """
    waiting = [groups[place : place + MAX_GROUPS] for place in range(0, len(groups), MAX_GROUPS)][::-1]
    envelopes: list[Envelope] = []
    number: int | None = None
    while waiting:
        part = waiting.pop()
        number = sequence() if number is None else number
        try:
            told = tuple(_told(group, logprobs) for group in part)
            batch = Batch(swarm, number, now, round, model[:MAX_NAME] or "?", told, tuple(uses))
            envelopes.append(_with_uses_or_without(key, batch))
            number, uses = None, () if envelopes[-1].batch.uses else uses
        except WireError as error:
            if len(part) > 1:
                middle = len(part) // 2
                waiting += [part[middle:], part[:middle]]
            elif left_out is not None:
                left_out(part[0], error)
    return envelopes


def _with_uses_or_without(key: Ed25519PrivateKey, batch: Batch) -> Envelope:
    try:
        return seal(key, batch)
    except WireError:
        if len(batch.groups) > 1 or not batch.uses:
            raise
        return seal(key, replace(batch, uses=()))


def encode_batch(batch: Batch) -> bytes:
    """The canonical bytes of a batch. Raises WireError if they could not be a batch."""
    try:
        body = BatchBody(
            swarm=batch.swarm,
            seq=batch.sequence,
            time=round(batch.created * 1000),
            round=batch.round,
            model=batch.model,
            groups=[_group_body(group) for group in batch.groups],
            uses=_use_bodies(batch.uses),
        )
        check_totals(body)
        plain = encode(body.model_dump())
    except ValidationError as error:
        raise WireError(Reason.SCHEMA, _first(error)) from error
    # A time or a log-prob beyond any bound.
    except (ValueError, OverflowError) as error:
        raise WireError(Reason.SCHEMA, str(error)[:_DETAIL]) from error
    if len(plain) > MAX_BATCH:
        raise WireError(Reason.TOO_LARGE, f"a batch of {len(plain)} bytes, {MAX_BATCH} are allowed")
    return plain


def decode_batch(plain: bytes) -> Batch:
    """The batch in its canonical bytes. Raises WireError, and nothing else, for any other bytes."""
    try:
        body = BatchBody.model_validate(decode(plain, MAX_VALUES, MAX_DEPTH))
        check_totals(body)
    except TooManyError as error:
        raise WireError(Reason.SCHEMA, str(error)) from error
    except CanonicalError as error:
        raise WireError(Reason.DECODE, str(error)) from error
    except ValidationError as error:
        raise WireError(Reason.SCHEMA, _first(error)) from error
    except ValueError as error:
        raise WireError(Reason.SCHEMA, str(error)) from error
    if encode(body.model_dump()) != plain:
        raise WireError(Reason.DECODE, "not the canonical spelling of this batch")
    return Batch(
        swarm=body.swarm,
        sequence=body.seq,
        created=body.time / 1000,
        round=body.round,
        model=body.model,
        groups=tuple(group_of(group) for group in body.groups),
        uses=tuple(Use(peer_id_of(use.key), use.admitted, use.trained) for use in body.uses),
    )


def _opened(data: bytes) -> tuple[bytes, bytes, bytes]:
    """(key, payload, signature)"""
    if len(data) > MAX_ENVELOPE:
        raise WireError(Reason.TOO_LARGE, f"an envelope of {len(data)} bytes, {MAX_ENVELOPE} are allowed")
    # Whatever another version looks like, it begins with an array that begins with its number.
    if len(data) > 1 and data[0] & 0xF0 == 0x90 and data[1] < 0x80 and data[1] != VERSION:
        raise WireError(Reason.VERSION, f"protocol version {data[1]}, this node speaks {VERSION}")
    try:
        frame = decode(data, max_values=5, max_depth=1)
    except CanonicalError as error:
        raise WireError(Reason.DECODE, str(error)) from error
    match frame:
        case [int(version), bytes(key), bytes(payload), bytes(signature)] if (
            # A bool is an int here, and equals one.
            version is not True
            and version == VERSION
            and len(key) == KEY_BYTES
            and len(signature) == _SIGNATURE_BYTES
            and encode(frame) == data
        ):
            return key, payload, signature
    raise WireError(Reason.DECODE, "not an array of version, key, payload and signature in its canonical spelling")


def _decompressed(payload: bytes) -> bytes:
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(payload, MAX_BATCH + 1)
    except zlib.error as error:
        raise WireError(Reason.DECODE, f"not a zlib stream: {error}"[:_DETAIL]) from error
    if len(plain) > MAX_BATCH:
        raise WireError(Reason.DECODE, f"more than {MAX_BATCH} bytes when decompressed")
    if not stream.eof or stream.unused_data:
        raise WireError(Reason.DECODE, "not exactly one whole zlib stream")
    return plain


def _id(key: bytes, plain: bytes) -> bytes:
    return hashlib.sha256(IDENTIFIED + key + plain).digest()


def _use_bodies(uses: Sequence[Use]) -> list[UseBody]:
    keyed = sorted(((public_key_of(use.peer), use) for use in uses), key=lambda pair: pair[0])
    return [UseBody(key=key, admitted=use.admitted, trained=use.trained) for key, use in keyed]


def _group_body(group: WireGroup) -> GroupBody:
    ref = group.ref
    return GroupBody(
        task=TaskBody(verifier=ref.verifier, version=ref.version, config=ref.config, seed=ref.seed, index=ref.index),
        prompt=group.prompt,
        step=group.policy_step,
        completions=[
            CompletionBody(
                text=completion.text.encode("utf-8", "replace").decode(),
                finished=completion.finished,
                logprobs=None if completion.logprobs is None else pack_logprobs(completion.logprobs),
            )
            for completion in group.completions
        ],
    )


def group_of(body: GroupBody) -> WireGroup:
    """A group as its maker tells it, from its checked form."""
    task = body.task
    return WireGroup(
        ref=TaskRef(task.verifier, task.version, task.config, task.seed, task.index),
        prompt=body.prompt,
        completions=tuple(
            Completion(
                text=answer.text,
                finished=answer.finished,
                logprobs=None if answer.logprobs is None else unpack_logprobs(answer.logprobs),
            )
            for answer in body.completions
        ),
        policy_step=body.step,
    )


def _told(group: RolloutGroup, logprobs: bool) -> WireGroup:
    """What others are told of a group: neither the answer nor the sampler's tokens."""
    completions = tuple(
        Completion(completion.text, completion.finished, logprobs=completion.logprobs if logprobs else None)
        for completion in group.completions
    )
    return WireGroup(group.task.ref, group.task.prompt, completions, group.policy_step)


def _first(error: ValidationError) -> str:
    """The first complaint, without the value: that is a stranger's and may be long."""
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:_DETAIL]
