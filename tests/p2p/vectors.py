"""Makes the test vectors of docs/protocol.md anew: `python -m tests.p2p.vectors > tests/p2p/vectors.json`.

They may change with the protocol's version only, or gain entries.
"""

import json
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack

from p2p.gossip import shard_of
from p2p.reasons import Reason
from p2p.wire import IDENTIFIED, SIGNED, Batch, Envelope, Use, WireError, WireGroup, encode_batch, open_envelope, seal
from rl.rollouts import Completion
from tests.p2p.forging import forge, frame, key, peer, tree
from verifiers.base import MAX_SEED, TaskRef

SHARDS = 8


def plain() -> Batch:
    """One group, as an ordinary node sends it."""
    task = TaskRef("reasoning_gym", "0.1.25", '{"dataset":"chain_sum","max_terms":3}', 1234567890123456789, 7)
    answers = (Completion("<answer>13</answer>", True), Completion("I think it is <answer>12", False))
    return Batch("main", 1, 1_800_000_000.123, 0, "tiny", (WireGroup(task, "State the answer: 6 + 7 = ?", answers, 0),))


def edges() -> Batch:
    """Log-probs, other scripts, empty text, the largest numbers."""
    task = TaskRef("exact", "1", '{"sha256":"' + "0" * 64 + '"}', MAX_SEED, MAX_SEED)
    answers = (
        Completion("", True, logprobs=(-0.5,)),
        Completion("größer, 更大, \U0001f600\0\n", False, logprobs=()),
        Completion("x" * 300, True, logprobs=(0.0, -1.25, -100.0)),
    )
    groups = (WireGroup(task, "?", answers, 2**32), replace(plain().groups[0], policy_step=2**16))
    uses = tuple(Use(peer(number), 3 * number, MAX_SEED) for number in (2, 3, 4))
    return Batch("a.swarm-of_2", MAX_SEED, 0.0, 255, "an organisation/a model", groups, uses)


def _changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    content = tree(plain())
    change(content)
    return forge(content)


def _answer(content: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = content["groups"][0]["completions"][0]
    return answer


def _use(end: bytes) -> dict[str, Any]:
    return {"key": bytes(31) + end, "admitted": 2, "trained": 1}


def bad() -> dict[str, bytes]:
    """Envelopes that have to be refused. All but the first ones are signed rightly."""
    good = seal(key(1), plain()).data
    version, public, payload, signature = msgpack.unpackb(good)
    spelled, stream = encode_batch(plain()), zlib.compress(encode_batch(plain()))
    other = key(2).public_key().public_bytes_raw()
    order = 2**252 + 27742317777372353535851937790883648493
    moved = (int.from_bytes(signature[32:], "little") + order).to_bytes(32, "little")
    return {
        "empty": b"",
        "cut short": good[:-1],
        "one byte too many": good + b"\0",
        "version 1": b"\x94\x01" + good[2:],
        "frame with a long array head": b"\xdc\0\x04" + good[1:],
        "frame with a long version": b"\x94\xcc\x02" + good[2:],
        "signature of zeros": bytes(msgpack.packb([version, public, payload, bytes(64)])),
        "another key": bytes(msgpack.packb([version, other, payload, signature])),
        "one bit of the payload": good.replace(payload, payload[:-1] + bytes([payload[-1] ^ 1])),
        "signed without its domain": bytes(msgpack.packb([version, public, payload, key(1).sign(payload)])),
        "signature with a large S": bytes(msgpack.packb([version, public, payload, signature[:32] + moved])),
        "not compressed": frame(spelled),
        "compressed stream cut short": frame(stream[:-1]),
        "two compressed streams": frame(stream + stream),
        "3 MiB of zeros": frame(zlib.compress(bytes(3 * 2**20), 9)),
        "nested 100 deep": forge(b"\x91" * 100 + b"\xc0"),
        "a key twice": forge(b"\x88" + spelled[1:].replace(b"\xa5round\0", b"\xa5round\0\xa5round\0", 1)),
        "a number in too many bytes": forge(spelled.replace(b"\xa5round\0", b"\xa5round\xcc\0", 1)),
        "keys in another order": forge(dict(reversed(tree(plain()).items()))),
        "invalid UTF-8": forge(spelled.replace(b"tiny", b"tin\xff", 1)),
        "a lone surrogate": forge(spelled.replace(b"\xa4tiny", b"\xa4\xed\xa0\x80y", 1)),
        "a negative number": _changed(lambda content: content.update(seq=-1)),
        "a float": _changed(lambda content: content.update(time=1.8e12)),
        "an unknown key": _changed(lambda content: _answer(content).update(reward=1)),
        "a missing key": _changed(lambda content: content.pop("model")),
        "a truth value for a number": _changed(lambda content: content.update(round=False)),
        "bytes for text": _changed(lambda content: _answer(content).update(text=b"13")),
        "a number above 2**63 - 1": _changed(lambda content: content.update(seq=2**63)),
        "a swarm's name with a slash": _changed(lambda content: content.update(swarm="a/b")),
        "no groups": _changed(lambda content: content.update(groups=[])),
        "65 groups": _changed(lambda content: content.update(groups=content["groups"] * 65)),
        "10,000 groups": _changed(lambda content: content.update(groups=content["groups"] * 10_000)),
        "one completion": _changed(lambda content: content["groups"][0]["completions"].pop()),
        "65 completions": _changed(lambda content: content["groups"][0].update(completions=[_answer(content)] * 65)),
        "a NaN": _changed(lambda content: _answer(content).update(logprobs=struct.pack(">f", float("nan")))),
        "an infinity": _changed(lambda content: _answer(content).update(logprobs=struct.pack(">f", float("-inf")))),
        "uses in another order": _changed(lambda content: content.update(uses=[_use(b"\1"), _use(b"\0")])),
        "uses of one node twice": _changed(lambda content: content.update(uses=[_use(b"\0")] * 2)),
        "uses of 65 nodes": _changed(lambda content: content.update(uses=[_use(bytes([n])) for n in range(65)])),
        "a public key of 31 bytes": _changed(lambda content: content.update(uses=[_use(b"")])),
        "log-probs of five bytes": _changed(lambda content: _answer(content).update(logprobs=bytes(5))),
    }


def reason_of(data: bytes) -> Reason:
    """Why an envelope is refused. Raises ValueError if it is not."""
    try:
        open_envelope(data)
    except WireError as error:
        return error.reason
    raise ValueError("not refused")


def shown(envelope: Envelope) -> dict[str, Any]:
    """A good vector: every step from the batch to the envelope."""
    spelled = encode_batch(envelope.batch)
    _, _, payload, signature = msgpack.unpackb(envelope.data)
    return {
        "batch": _json(msgpack.unpackb(spelled)),
        "canonical": spelled.hex(),
        "payload": payload.hex(),
        "signature": signature.hex(),
        "envelope": envelope.data.hex(),
        "id": envelope.id.hex(),
    }


def _json(value: Any) -> Any:
    """With log-probs and keys as hexadecimal text, which JSON has no bytes for."""
    if isinstance(value, dict):
        return {name: _json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_json(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value


def vectors() -> dict[str, Any]:
    """All of them."""
    signer = key(1)
    return {
        "private_key": signer.private_bytes_raw().hex(),
        "public_key": signer.public_key().public_bytes_raw().hex(),
        "peer_id": peer(1),
        "shards": SHARDS,
        "shard": shard_of(peer(1), SHARDS),
        "signed_prefix": SIGNED.hex(),
        "id_prefix": IDENTIFIED.hex(),
        "good": {"plain": shown(seal(signer, plain())), "edges": shown(seal(signer, edges()))},
        "bad": {name: {"envelope": data.hex(), "reason": reason_of(data)} for name, data in bad().items()},
    }


if __name__ == "__main__":
    json.dump(vectors(), sys.stdout, indent=1, ensure_ascii=True)
    print()
