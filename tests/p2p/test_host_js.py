"""Gossip with js-libp2p. Set SWARMNODE_JS_PEER to a directory with peer.mjs and its installed node_modules."""

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

from tests.p2p.hosts import TOPIC, meshed, running, until

_DIRECTORY = os.environ.get("SWARMNODE_JS_PEER", "")
_NODE = shutil.which("node")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_NODE is None, reason="Node.js is not installed"),
    pytest.mark.skipif(
        not _DIRECTORY or not (Path(_DIRECTORY) / "node_modules").is_dir(),
        reason="SWARMNODE_JS_PEER names no directory with peer.mjs and node_modules",
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
async def _js_peer(*options: str) -> AsyncIterator[JsPeer]:
    peer = JsPeer()
    command = [str(_NODE), str(Path(_DIRECTORY) / "peer.mjs"), "--topic", TOPIC, "--secs", "30", *options]
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
