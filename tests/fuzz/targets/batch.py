"""What is signed and compressed in an envelope: whoever signs it rightly can have anything in it."""

from p2p.wire import WireError, decode_batch, encode_batch
from tests.p2p.forging import batch, group
from tests.p2p.vectors import edges, plain


def seeds() -> list[bytes]:
    return [encode_batch(one) for one in (plain(), edges(), batch(3, [group(1), group(2, ["a", "b", "c"])]))]


def run(data: bytes) -> None:
    try:
        found = decode_batch(data)
    except WireError as error:
        assert len(str(error)) < 300
        return
    # A date is a float once it is read, and no longer exact in some hundred thousand years.
    if found.created < 2**40:
        assert encode_batch(found) == data
