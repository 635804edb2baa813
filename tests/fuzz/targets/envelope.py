"""Envelopes as they come from the network."""

import zlib

import msgpack

from p2p.wire import MAX_ENVELOPE, WireError, encode_batch, open_envelope, seal
from tests.p2p.forging import key
from tests.p2p.vectors import bad, edges, plain


def seeds() -> list[bytes]:
    return [seal(key(1), plain()).data, seal(key(2), edges()).data, *bad().values()]


def run(data: bytes) -> None:
    try:
        envelope = open_envelope(data)
    except WireError as error:
        assert len(str(error)) < 300
        return
    assert envelope.data == data
    assert len(data) <= MAX_ENVELOPE
    assert encode_batch(envelope.batch) == zlib.decompress(msgpack.unpackb(data)[2])
