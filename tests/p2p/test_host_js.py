"""Gossip with js-libp2p, where Node.js 20 is installed and `npm install` has been run in `tests/p2p/js`.

SWARMNODE_JS_PEER names another directory with that `peer.mjs` and its node_modules.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p.gossip import topic_of
from p2p.host import HostSettings, open_host
from p2p.settings import AdmissionSettings, NetworkSettings
from p2p.swarm import Swarm, open_swarm
from tests.p2p.fakes import FakePool, FakeTasks
from tests.p2p.forging import key
from tests.p2p.hosts import TOPIC, meshed, running, until
from tests.p2p.test_swarm import groups

_DIRECTORY = Path(os.environ.get("SWARMNODE_JS_PEER") or Path(__file__).with_name("js"))
_NODE = shutil.which("node")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_NODE is None, reason="Node.js is not installed"),
    pytest.mark.skipif(
        not (_DIRECTORY / "node_modules").is_dir(),
        reason=f"js-libp2p is not installed: run `npm install` in {_DIRECTORY}",
    ),
]


class JsPeer:
    """A js-libp2p process and what it printed."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Its events of a kind."""
        return [event for event in self.events if event["ev"] == kind]


@asynccontextmanager
async def _js_peer(*options: str, topic: str = TOPIC) -> AsyncIterator[JsPeer]:
    peer = JsPeer()
    command = [str(_NODE), str(_DIRECTORY / "peer.mjs"), "--topic", topic, "--secs", "30", *options]
    async with trio.open_nursery() as nursery:
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        output = process.stdout

        async def read() -> None:
            buffer = b""
            async for chunk in output:
                *lines, buffer = (buffer + chunk).split(b"\n")
                peer.events += [json.loads(line) for line in lines]

        nursery.start_soon(read)
        try:
            yield peer
        finally:
            process.kill()
            nursery.cancel_scope.cancel()


async def test_messages_pass_both_ways_between_js_and_this_node_and_over_it() -> None:
    async with running() as a, running() as b:
        await meshed(a, b)
        async with _js_peer("--dial", a.address, "--pub", "3", "--size", "200000", "--interval", "300") as js:
            await until(lambda: len(a.delivered) == len(b.delivered) == 3, 20)
            for number in range(3):
                await b.host.publish(TOPIC, bytes([number]) * 250_000)
            await until(lambda: len(js.of("recv")) == 3)
            assert {event["from"] for event in js.of("recv")} == {b.host.peer_id}
            assert not a.watcher.offences + b.watcher.offences
            assert len(a.host.mesh(TOPIC)) == 2


async def test_this_node_dials_a_js_node() -> None:
    async with running() as a, _js_peer() as js:
        await a.subscribe()
        await until(lambda: js.of("addr"), 20)
        peer = await a.host.connect(js.of("addr")[0]["addrs"][0])
        await until(lambda: a.host.mesh(TOPIC) == [peer])
        await a.host.publish(TOPIC, b"hello")
        await until(lambda: [event.get("text") for event in js.of("recv")] == ["hello"])
        await until(lambda: "/meshsub/1.1.0" in a.host.protocols(peer))


@asynccontextmanager
async def _swarm() -> AsyncIterator[Swarm]:
    """A node's part in the swarm `main`, on libp2p."""
    async with open_swarm(
        lambda watcher: open_host(HostSettings(key=key(1), app_score=watcher.score), watcher),
        key(1),
        NetworkSettings(),
        AdmissionSettings(),
        FakeTasks(),
        FakePool(),
        round=lambda: 1,
        model="tiny",
        say=lambda level, text: None,
    ) as swarm:
        yield swarm


async def test_a_js_node_on_the_swarm_s_topic_gets_batches_byte_by_byte() -> None:
    topic = topic_of("main", 0)
    async with _swarm() as swarm, _js_peer("--dial", swarm.status().addresses[0], topic=topic) as js:
        await until(lambda: swarm.transport.mesh(topic), 20)
        for number in range(5):
            await swarm.share(groups(number, 2), number)
        await until(lambda: len(js.of("recv")) == 5)
        held = swarm._parts.store.recent(60, 10, lambda origin: True)
        sent = [swarm._parts.store.get(id_) or b"" for id_, _ in held]
        assert {event["sha"] for event in js.of("recv")} == {hashlib.sha256(data).hexdigest()[:12] for data in sent}
        assert {event["from"] for event in js.of("recv")} == {swarm.transport.peer_id}
        assert swarm.status().rejected == {}


async def test_what_a_js_node_says_is_refused_where_it_is_no_batch_and_bans_it() -> None:
    topic = topic_of("main", 0)
    async with _swarm() as swarm:
        options = ("--dial", swarm.status().addresses[0], "--pub", "20", "--interval", "100")
        async with _js_peer(*options, topic=topic) as js:
            await until(lambda: swarm.status().rejected.get("decode", 0) > 1, 20)
            await until(lambda: js.of("disconnect"), 20)
            (row,) = swarm.status().peers
            assert row.banned_seconds > 0
            assert row.rejected["decode"] > 1
            assert not row.connected
