"""Compressed payloads, rightly signed."""

import zlib

from p2p.wire import WireError, encode_batch, open_envelope
from tests.p2p.forging import frame
from tests.p2p.vectors import edges, plain


def seeds() -> list[bytes]:
    return [zlib.compress(encode_batch(one), level) for one in (plain(), edges()) for level in (0, 6)]


def run(data: bytes) -> None:
    try:
        open_envelope(frame(data))
    except WireError as error:
        assert len(str(error)) < 300
