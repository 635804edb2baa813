"""Bytes of strangers, and what becomes of them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifiers.codec import MAX_FRAME, FrameError, pack, unpack

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=64),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=4),
)


@given(VALUES)
def test_what_was_packed_comes_back(value: Any) -> None:
    assert unpack(pack(value)) == value


@given(st.binary(max_size=200))
def test_any_other_bytes_are_a_frame_error_or_a_value(data: bytes) -> None:
    try:
        unpack(data)
    except FrameError:
        return


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x01\x01",
        b"\xa1\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x81\x90\x01",
        b"\x81\x80\x01",
        b"\xc7\x0c\xff" + b"\xff" * 12,
    ],
    ids=["nothing", "reserved", "two", "utf8", "long-list", "long-bytes", "deep", "list-key", "map-key", "timestamp"],
)
def test_bytes_that_are_no_value_are_a_frame_error(data: bytes) -> None:
    with pytest.raises(FrameError, match="not msgpack"):
        unpack(data)


def test_the_limit_holds_both_ways() -> None:
    longest = bytes(MAX_FRAME - 5)
    assert len(pack(longest)) == MAX_FRAME
    assert unpack(pack(longest)) == longest
    with pytest.raises(FrameError, match="do not fit"):
        pack(longest + b"x")
    with pytest.raises(FrameError, match="are allowed"):
        unpack(bytes(MAX_FRAME + 1))


@pytest.mark.parametrize("value", [{1, 2}, 2**64, "\ud800", object()])
def test_what_msgpack_does_not_hold_is_a_frame_error(value: Any) -> None:
    with pytest.raises(FrameError, match="cannot be packed"):
        pack(value)
