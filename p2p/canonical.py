"""One spelling for each value: the subset of msgpack that the protocol uses, looked through before it is decoded.

Decoding a few hostile bytes can make a million objects. `scan` walks the headers alone and stops at the first limit, so
that what is decoded afterwards is small in every respect.
"""

from typing import Any

import msgpack

_MAP, _ARRAY, _TEXT, _BYTES, _SCALAR = range(5)

_FIXED = (
    dict.fromkeys((*range(0x80), 0xC0, 0xC2, 0xC3), (_SCALAR, 0, 0))
    | {byte: (_MAP, 0, byte & 0x0F) for byte in range(0x80, 0x90)}
    | {byte: (_ARRAY, 0, byte & 0x0F) for byte in range(0x90, 0xA0)}
    | {byte: (_TEXT, 0, byte & 0x1F) for byte in range(0xA0, 0xC0)}
)
_SIZED = {
    0xC4: (_BYTES, 1, 0),
    0xC5: (_BYTES, 2, 0),
    0xC6: (_BYTES, 4, 0),
    0xCC: (_SCALAR, 0, 1),
    0xCD: (_SCALAR, 0, 2),
    0xCE: (_SCALAR, 0, 4),
    0xCF: (_SCALAR, 0, 8),
    0xD9: (_TEXT, 1, 0),
    0xDA: (_TEXT, 2, 0),
    0xDB: (_TEXT, 4, 0),
    0xDC: (_ARRAY, 2, 0),
}
_HEADS = [(_FIXED | _SIZED).get(byte) for byte in range(256)]
"""First byte -> kind, bytes of length that follow it, and the length (or payload) where that is fixed. None for what
the protocol has no use for: negative integers, floats, extensions, and counts above 65535."""


class CanonicalError(ValueError):
    """Bytes that are not one value in the protocol's subset of msgpack, or more than a limit allows."""


class TooManyError(CanonicalError):
    """More values than the limit: too many groups or completions, if it was ever meant for a batch."""


def scan(data: bytes, max_values: int, max_depth: int) -> None:
    """Raises CanonicalError unless `data` is one value of at most `max_values` values in all, keys counted, with maps
    and arrays at most `max_depth` deep. Takes time in proportion to the values, not to the bytes in them."""
    place, values, end = 0, 0, len(data)
    open_: list[int] = [1]
    while open_:
        if not open_[-1]:
            open_.pop()
            continue
        open_[-1] -= 1
        values += 1
        if values > max_values:
            raise TooManyError(f"more than {max_values} values")
        if place >= end:
            raise CanonicalError("ends too early")
        head = _HEADS[data[place]]
        if head is None:
            raise CanonicalError(f"type {data[place]:#04x} is not used")
        kind, width, length = head
        place += 1
        if width:
            length = int.from_bytes(data[place : place + width], "big")
            place += width
        if kind <= _ARRAY:
            if len(open_) > max_depth:
                raise CanonicalError(f"nested more than {max_depth} deep")
            open_.append(2 * length if kind == _MAP else length)
        else:
            place += length
    if place != end:
        raise CanonicalError("ends too early" if place > end else f"{end - place} bytes too many")


def decode(data: bytes, max_values: int, max_depth: int) -> Any:
    """The value in `data`, after `scan`. Raises CanonicalError. Other spellings of a value are found by encoding it."""
    scan(data, max_values, max_depth)
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True)
    # All that msgpack raises for bad bytes is a ValueError or an UnpackException; bad UTF-8 is a ValueError too.
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise CanonicalError(f"not msgpack: {error}"[:200]) from error


def encode(value: Any) -> bytes:
    """`value` with the shortest head for every length and integer. Raises ValueError for text with lone surrogates."""
    return bytes(msgpack.packb(value, use_bin_type=True))
