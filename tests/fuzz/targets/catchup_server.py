"""Requests for what a peer missed."""

import trio
from trio.testing import MockClock

from p2p.serving import MAX_ANSWER, SESSION_BYTES, Server, get_frame, list_frame
from p2p.store import EnvelopeStore
from p2p.transport import FrameTooLong, TransportError
from p2p.wire import seal
from tests.fuzz.scratch import Stream, cut, joined
from tests.p2p.forging import batch, key, peer

ENVELOPES = [seal(key(1), batch(number)) for number in range(1, 5)]


def seeds() -> list[bytes]:
    ids = [envelope.id for envelope in ENVELOPES]
    return [
        joined([list_frame(600, 1, [0]), get_frame(ids[:2]), get_frame(ids[2:])]),
        joined([list_frame(3, 8, [1, 5]), get_frame([bytes(32)])]),
    ]


def run(data: bytes) -> None:
    trio.run(_serve, data, clock=MockClock(autojump_threshold=0))


async def _serve(data: bytes) -> None:
    store = EnvelopeStore()
    for envelope in ENVELOPES:
        store.add(envelope)
    told: list[str] = []
    stream = Stream(cut(data), peer(2))
    try:
        await Server(store, lambda peer, what: told.append(what), lambda peer: False).answer(stream)
    except FrameTooLong:
        assert told
    except TransportError:
        pass
    assert stream.sent <= SESSION_BYTES + MAX_ANSWER
