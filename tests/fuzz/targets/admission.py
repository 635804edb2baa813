"""Gossiped and requested envelopes on their whole way into the pool, up to the verifiers."""

import trio
from trio.testing import MockClock

from p2p.wire import encode_batch
from tests.fuzz.scratch import cut, joined
from tests.p2p.admitting import BAD, GOOD, TRAIN, Node
from tests.p2p.forging import batch, forge, group, key, ref


def seeds() -> list[bytes]:
    one, other = group(TRAIN[0]), group(TRAIN[1], ["right", "wrong", "x"])
    strange = [group(1, at=ref(1, config=f"do {what}")) for what in ("none", "unknown", "fail", "ill")]
    command = group(2, at=ref(2, verifier="command"))
    batches = [batch(1, [one]), batch(2, [one, other]), batch(1, [other]), batch(3, strange), batch(4, [command])]
    plain = [encode_batch(each) for each in batches]
    return [joined([b"\0" + plain[0], b"\1" + plain[0]]), joined([bytes([n]) + p for n, p in enumerate(plain)])]


def run(data: bytes) -> None:
    trio.run(_admit, data, clock=MockClock(autojump_threshold=0))


async def _admit(data: bytes) -> None:
    node = Node()
    for piece in cut(data):
        how = piece[0] if piece else 0
        envelope = forge(piece[1:], key(1 + (how & 1)))
        node.send(envelope, (GOOD, BAD)[how >> 1 & 1], requested=bool(how & 4))
    await node.settle()
    for scored in node.pool.groups:
        task = scored.group.task
        assert task.prompt == f"question {task.ref.index}"
        assert not task.held_out
        assert len(scored.rewards) == len(scored.group.completions)
    counts = node.admission.counts
    assert counts.admitted == len(node.pool.groups) <= counts.groups
