"""Answers of a peer that was asked for what this node missed."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import trio
from trio.testing import MockClock

from p2p.canonical import encode
from p2p.catchup import CatchUp
from p2p.store import EnvelopeStore
from p2p.transport import Transport
from p2p.wire import open_envelope
from tests.fuzz.scratch import Stream, cut, joined
from tests.p2p.admitting import GOOD, Node, sealed
from tests.p2p.forging import peer

ENVELOPES = [open_envelope(sealed(number)) for number in range(1, 4)]


def seeds() -> list[bytes]:
    entries = b"".join(one.id + len(one.data).to_bytes(4, "big") for one in ENVELOPES)
    # Newest first is how they are listed, oldest first how they are asked for.
    data = [one.data for one in reversed(ENVELOPES)]
    return [
        joined([encode(["have", entries]), *data]),
        joined([encode(["have", entries]), b"", data[0], data[1]]),
        joined([encode(["have", b""])]),
        joined([encode(["busy", 8])]),
    ]


def run(data: bytes) -> None:
    trio.run(_visit, data, clock=MockClock(autojump_threshold=0))


class _Network:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def serve(self, protocol: str, serve: Any) -> None:
        pass

    def connections(self) -> list[Any]:
        return []

    @asynccontextmanager
    async def open(self, peer: str, protocol: str) -> AsyncIterator[Stream]:
        yield Stream(cut(self._data), peer)


async def _visit(data: bytes) -> None:
    node, told = Node(), list[str]()
    network = cast(Transport, _Network(data))
    catch_up = CatchUp(network, EnvelopeStore(), node.admission, lambda peer, what: told.append(what))
    with trio.fail_after(60):
        pause = await catch_up._tried(peer(2), 0)
    assert pause >= 0
    assert not told or pause == math.inf
    assert not catch_up._claimed
    await node.settle()
    assert all(scored.origin == GOOD or scored.group.task.prompt for scored in node.pool.groups)
