"""Envelopes that are rightly signed and wrong: each is refused for its reason, before it costs anything."""

import struct
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any, cast

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.reasons import Reason
from p2p.schema import MAX_CONFIG, MAX_LOGPROBS, MAX_PROMPT, MAX_TEXT
from p2p.wire import MAX_BATCH, MAX_ENVELOPE, SIGNED, WireError, encode_batch, open_envelope, seal
from tests.p2p.forging import batch, forge, frame, key, tree

Tree = dict[str, Any]


def refused(data: bytes) -> Reason:
    with pytest.raises(WireError) as caught:
        open_envelope(data)
    assert len(str(caught.value)) < 300
    return caught.value.reason


def spoiled(change: Callable[[Tree], object]) -> bytes:
    content = tree()
    change(content)
    return forge(content)


def completion(**changes: Any) -> Callable[[Tree], object]:
    return lambda content: content["groups"][0]["completions"][0].update(changes)


def task(**changes: Any) -> Callable[[Tree], object]:
    return lambda content: content["groups"][0]["task"].update(changes)


def in_group(**changes: Any) -> Callable[[Tree], object]:
    return lambda content: content["groups"][0].update(changes)


def top(**changes: Any) -> Callable[[Tree], object]:
    return lambda content: content.update(changes)


def many(content: Tree, groups: int, completions: int) -> None:
    answers = [{"text": "", "finished": True, "logprobs": None}] * completions
    content["groups"] = [content["groups"][0] | {"completions": answers}] * groups


SCHEMA: dict[str, Callable[[Tree], object]] = {
    "10,000 groups": lambda content: many(content, 10_000, 2),
    "one group too many": lambda content: many(content, 65, 2),
    "too many completions in all": lambda content: many(content, 17, 64),
    "too many completions in a group": lambda content: many(content, 1, 65),
    "one completion": lambda content: many(content, 1, 1),
    "no group": top(groups=[]),
    "a key too many": top(answer="42"),
    "a key too many in a group": in_group(reward=1),
    "a key too many in a completion": completion(reward=1),
    "a key of bytes": lambda content: cast(dict[Any, Any], content).update({b"swarm": "main"}),
    "a key too few": lambda content: content.pop("model"),
    "a bad swarm": top(swarm="../other"),
    "text for a number": top(seq="1"),
    "a truth value for a number": top(seq=True),
    "nothing for a number": top(seq=None),
    "a number for text": top(model=7),
    "bytes for text": completion(text=b"right"),
    "text for bytes": completion(logprobs="abcd"),
    "a number for a truth value": completion(finished=1),
    "a seed beyond 63 bits": task(seed=2**63),
    "a map for a list": top(groups={}),
    "a list for a map": in_group(task=["fake", "1", "{}", 1, 1]),
    "a long completion": completion(text="x" * (MAX_TEXT + 1)),
    "a long prompt": in_group(prompt="x" * (MAX_PROMPT + 1)),
    "a long configuration": task(config="x" * (MAX_CONFIG + 1)),
    "a long verifier": task(verifier="x" * 129),
    "no verifier": task(verifier=""),
    "a NaN": completion(logprobs=struct.pack(">2f", -1.0, float("nan"))),
    "an infinity": completion(logprobs=struct.pack(">2f", -1.0, float("-inf"))),
    "half a number": completion(logprobs=b"\0\0\0"),
    "too many log-probs": completion(logprobs=bytes(4 * MAX_LOGPROBS + 4)),
    "a list": lambda content: content,
}


@pytest.mark.parametrize("name", [name for name in SCHEMA if name != "a list"])
def test_what_is_no_batch_is_refused(name: str) -> None:
    assert refused(spoiled(SCHEMA[name])) == Reason.SCHEMA


def test_too_many_logprobs_in_all_are_refused() -> None:
    content = tree()
    content["groups"][0]["completions"] = [
        {"text": "", "finished": True, "logprobs": bytes(3 * MAX_LOGPROBS)} for _ in range(2)
    ]
    assert refused(forge(content)) == Reason.SCHEMA


def reordered(content: Tree) -> Tree:
    return dict(sorted(content.items(), reverse=True))


def doubled() -> bytes:
    plain = encode_batch(batch())
    name, value = msgpack.packb("round"), msgpack.packb(5)
    assert plain[:1] == b"\x87"
    return b"\x88" + plain[1:].replace(name + value, (name + value) * 2, 1)


def wide(name: str, number: int) -> bytes:
    """The batch with a number in eight bytes that fits fewer."""
    plain, head = encode_batch(batch()), msgpack.packb(name)
    short = head + msgpack.packb(number)
    assert plain.count(short) == 1
    return plain.replace(short, head + b"\xcf" + number.to_bytes(8, "big"))


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def floats(content: Tree) -> Tree:
    return content | {"time": 1.5}


DECODE: dict[str, bytes] = {
    "nothing": b"",
    "two values": encode_batch(batch()) * 2,
    "keys in another order": msgpack.packb(reordered(tree())),
    "a key twice": doubled(),
    "a long number": wide("round", 5),
    "a negative number": msgpack.packb(tree() | {"seq": -1}),
    "a float": msgpack.packb(floats(tree())),
    "a NaN": msgpack.packb(tree() | {"time": float("nan")}),
    "an extension": msgpack.packb(tree() | {"model": msgpack.ExtType(1, b"x")}),
    "a key that is a number": msgpack.packb(tree() | {1: 1}),
    "a key that is a list": b"\x81\x90\xc0",
    "nested": nested(6),
    "deeply nested": nested(100_000),
    "very deeply nested": nested(2_000_000),
    "a count that lies": b"\xdc\xff\xff",
    "a length that lies": b"\xdb\xff\xff\xff\xff",
    "a map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "a lone surrogate": encode_batch(batch()).replace(b"right", b"ri\xed\xa0\x80", 1),
    "broken UTF-8": encode_batch(batch()).replace(b"right", b"righ\xff", 1),
}


@pytest.mark.parametrize("name", list(DECODE))
def test_what_is_not_the_one_spelling_is_refused(name: str) -> None:
    assert refused(forge(DECODE[name])) == Reason.DECODE


def test_compression_bombs_are_refused_and_take_no_memory() -> None:
    thousandfold = zlib.compress(bytes(64 * 2**20), 9)
    million = b"\xdc\x00\x1f" + (b"\xdc\xff\xff" + b"\x80" * 65535) * 31
    tracemalloc.start()
    try:
        assert refused(frame(thousandfold)) == Reason.DECODE
        for plain in (b"\x90" * MAX_BATCH, b"\x80" * MAX_BATCH, b"\x91\xc0" * 2**20, million):
            assert refused(forge(plain)) in (Reason.DECODE, Reason.SCHEMA)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * MAX_BATCH


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"random bytes",
        zlib.compress(encode_batch(batch()))[:-1],
        zlib.compress(encode_batch(batch())) + b"\0",
        zlib.compress(encode_batch(batch())) * 2,
        zlib.compress(encode_batch(batch()))[2:-4],
        bytes([*zlib.compress(encode_batch(batch()))[:-1], 0]),
    ],
)
def test_what_is_not_one_whole_zlib_stream_is_refused(payload: bytes) -> None:
    assert refused(frame(payload)) == Reason.DECODE


def test_an_envelope_that_is_too_large_is_refused_unread() -> None:
    assert refused(b"\xff" * (MAX_ENVELOPE + 1)) == Reason.TOO_LARGE
    assert refused(bytes(10 * 2**20)) == Reason.TOO_LARGE


def parts() -> list[Any]:
    opened: list[Any] = msgpack.unpackb(seal(key(1), batch()).data)
    return opened


@pytest.mark.parametrize("version", [0, 1, 127])
def test_another_version_is_told_apart_from_garbage(version: int) -> None:
    assert refused(msgpack.packb([version, *parts()[1:]])) == Reason.VERSION
    assert refused(msgpack.packb([version])) == Reason.VERSION


@pytest.mark.parametrize(
    "change",
    [
        lambda p: [True, *p[1:]],
        lambda p: [300, *p[1:]],
        lambda p: p[:3],
        lambda p: [*p, b""],
        lambda p: [p[0], p[1][:31], p[2], p[3]],
        lambda p: [p[0], p[1], p[2], p[3][:63]],
        lambda p: [p[0], p[1], "text", p[3]],
        lambda p: [p[0], p[1], [p[2]], p[3]],
        lambda p: {"v": 1},
        lambda p: 7,
    ],
)
def test_another_frame_is_refused(change: Callable[[list[Any]], Any]) -> None:
    assert refused(msgpack.packb(change(parts()))) == Reason.DECODE


def test_a_frame_has_one_spelling() -> None:
    whole = seal(key(1), batch()).data
    assert whole[:2] == b"\x94\x02"
    assert refused(b"\xdc\x00\x04" + whole[1:]) == Reason.DECODE
    assert refused(b"\x94\xcc\x02" + whole[2:]) == Reason.DECODE
    assert refused(b"") == Reason.DECODE


def test_forged_signatures_are_refused() -> None:
    version, public, payload, signature = parts()
    other = Ed25519PrivateKey.generate()
    order = 2**252 + 27742317777372353535851937790883648493
    moved = (int.from_bytes(signature[32:], "little") + order).to_bytes(32, "little")
    for forged in (
        [version, public, payload, bytes(64)],
        # Somebody else's, made for the same payload: spoofed.
        [version, public, payload, other.sign(SIGNED + payload)],
        [version, other.public_key().public_bytes_raw(), payload, signature],
        # The key's own, but over something else.
        [version, public, payload, key(1).sign(payload)],
        [version, public, payload, key(1).sign(b"libp2p-pubsub:" + payload)],
        # The other number that verifies the same, for those who do not ask for the smaller one.
        [version, public, payload, signature[:32] + moved],
        # No point of the curve.
        [version, b"\xff" * 32, payload, signature],
        [version, b"\x02" + bytes(31), payload, signature],
    ):
        assert refused(msgpack.packb(forged)) == Reason.SIGNATURE
