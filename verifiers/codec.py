"""The one bounded codec: values as msgpack, between processes, in files and wherever else bytes of others are read.

The bytes may be hostile, so their number is checked before they are decoded, and nothing nested deeper than msgpack's
own limit is decoded. No value needs more memory than a small multiple of its bytes.
"""

from typing import Any

import msgpack

MAX_FRAME = 64 * 2**20
"""Bytes in one frame. A round's groups take some hundred kilobytes; this leaves room and still bounds memory."""


class FrameError(Exception):
    """The other side sent bytes that are not a frame; nothing after them can be trusted."""


def pack(value: Any) -> bytes:
    """`value` as msgpack. Raises FrameError if it holds a type that msgpack does not, or is too long for a frame."""
    try:
        data = msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"cannot be packed: {error}") from error
    if len(data) > MAX_FRAME:
        raise FrameError(f"{len(data)} bytes do not fit a frame of {MAX_FRAME}")
    return bytes(data)


def unpack(data: bytes) -> Any:
    """The value in `data`, all of it. Raises FrameError for anything else than one well-formed value."""
    if len(data) > MAX_FRAME:
        raise FrameError(f"a frame of {len(data)} bytes, {MAX_FRAME} are allowed")
    try:
        value = msgpack.unpackb(data, strict_map_key=False)
    # msgpack raises ValueError (and its subclasses) for bad bytes; UnicodeDecodeError is one of those too. TypeError
    # comes of a map that has a list or a map for a key.
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise FrameError(f"not msgpack: {error}") from error
    return value
