"""Changes inputs by what they mean: one value of a JSON or msgpack tree becomes another, and the rest stays readable.

Flipped bytes alone rarely get past a parser, so what stands behind it would see little.
"""

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

import msgpack

from tests.fuzz.scratch import cut, joined

_DEEP = "@deep@"
"""Stands for many lists inside one another, which no writer would write."""

_DEPTHS = (20, 500, 900, 1000, 5000, 100_000)

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**400),
    *(0.5, -0.0, 1e-320, 1e18, 1e19, 1.7e308, -1.7e308, math.nan, math.inf, -math.inf),
    *("", " ", "0", "1", "inf", "ok", "error", "\0", "\ud800", "\u2028", "e\u0301", "\U0001f600", "../x", "x" * 300),
    *(b"", b"\xff" * 40, [], {}, [[]], {"": {}}, [1, 2], _DEEP),
)


def mutated(data: bytes, random: Random) -> bytes:
    """`data` with a change or a few."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        data = _changed(data, random)
    return data


def _changed(data: bytes, random: Random) -> bytes:
    ways: list[Callable[[bytes, Random], bytes | None]] = [_pieces, _json_line, _msgpack, _framed, _after_a_byte]
    if random.random() < 0.8:
        for way in ways:
            if (result := way(data, random)) is not None:
                return result
    return _bytes(data, random)


def _pieces(data: bytes, random: Random) -> bytes | None:
    pieces = list(cut(data))
    if not pieces or joined(pieces) != data:
        return None
    place = random.randrange(len(pieces))
    match random.randrange(8):
        case 0:
            del pieces[place]
        case 1:
            pieces.insert(place, random.choice(pieces))
        case _:
            pieces[place] = _changed(pieces[place], random)[: 2**16 - 1]
    return joined(pieces)


def _json_line(data: bytes, random: Random) -> bytes | None:
    lines = data.split(b"\n")
    place = random.randrange(len(lines))
    for part in (data, lines[place]):
        if part.strip()[:1] in (b"{", b"["):
            try:
                tree = _tree(json.loads(part), random)
                text = json.dumps(tree, ensure_ascii=random.random() < 0.9).encode("utf-8", "surrogatepass")
            except (ValueError, TypeError, RecursionError):
                continue
            depth = random.choice(_DEPTHS)
            text = text.replace(f'"{_DEEP}"'.encode(), b"[" * depth + b"]" * depth)
            return text if part is data else b"\n".join([*lines[:place], text, *lines[place + 1 :]])
    return None


def _msgpack(data: bytes, random: Random) -> bytes | None:
    if data[:1] < b"\x80" or len(data) < 2:
        return None
    try:
        tree = _tree(msgpack.unpackb(data, strict_map_key=False), random)
        packed = bytes(msgpack.packb(tree, unicode_errors="surrogatepass"))
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException):
        return None
    return packed.replace(msgpack.packb(_DEEP), b"\x91" * random.choice(_DEPTHS) + b"\xc0")


def _framed(data: bytes, random: Random) -> bytes | None:
    if len(data) < 5 or int.from_bytes(data[:4], "big") != len(data) - 4:
        return None
    inner = _msgpack(data[4:], random)
    return None if inner is None else len(inner).to_bytes(4, "big") + inner


def _after_a_byte(data: bytes, random: Random) -> bytes | None:
    inner = _msgpack(data[1:], random) if data[:1] < b"\x10" else None
    return None if inner is None else data[:1] + inner


def _tree(tree: Any, random: Random) -> Any:
    """With one of its values changed; the deeper the more of them there are."""
    if isinstance(tree, dict) and tree and random.random() < 0.85:
        key = random.choice(list(tree))
        changed = dict(tree)
        match random.randrange(10):
            case 0:
                del changed[key]
            case 1:
                changed[random.choice((f"{key}x", "", "error", 3, "\ud800"))] = changed.pop(key)
            case _:
                changed[key] = _tree(tree[key], random)
        return changed
    if isinstance(tree, list) and tree and random.random() < 0.85:
        place, changed_list = random.randrange(len(tree)), list(tree)
        match random.randrange(10):
            case 0:
                del changed_list[place]
            case 1:
                changed_list[place:place] = [tree[place]] * random.choice((1, 2, 70))
            case _:
                changed_list[place] = _tree(tree[place], random)
        return changed_list
    if isinstance(tree, str) and random.random() < 0.3:
        place = random.randrange(len(tree) + 1)
        return tree[:place] + random.choice([value for value in VALUES if isinstance(value, str)]) + tree[place:]
    if type(tree) in (int, float) and random.random() < 0.3 and abs(tree) < 2**62:
        return tree + random.choice((-1, 1, 64))
    return random.choice(VALUES)


def _bytes(data: bytes, random: Random) -> bytes:
    place = random.randrange(len(data) + 1)
    before, after = data[:place], data[place:]
    some = random.randbytes(random.choice((1, 1, 2, 8)))
    length = random.randrange(64)
    return random.choice((
        before + some + after[len(some) :],
        before + some + after,
        before + after[length:],
        before + 3 * after[:length] + after[length:],
        before,
    ))  # fmt: skip
