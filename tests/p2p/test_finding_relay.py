"""Being reached through a relay, and what a relay refuses."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Status

from p2p.addresses import parse_address
from p2p.host import relay as relay_module
from p2p.host.network import parse_peer
from p2p.host.relay import HOP, RelayClient, RelayServer
from p2p.host.tunnel import Pipe
from p2p.transport import TransportError
from tests.p2p.hosts import TOPIC, Node, running, until


class Said(list[tuple[str, str]]):
    def __call__(self, level: str, text: str) -> None:
        self.append((level, text))


@asynccontextmanager
async def behind(relay: Node, said: Said) -> AsyncIterator[tuple[Node, str]]:
    """A node with a place at a relay, and its address there."""
    async with running() as node, trio.open_nursery() as nursery:
        client = RelayClient(node.host, [relay.address], said)
        nursery.start_soon(client.run)
        await until(lambda: any("p2p-circuit" in address for address in node.host.addresses()))
        yield node, next(address for address in node.host.addresses() if "p2p-circuit" in address)
        nursery.cancel_scope.cancel()


async def test_a_node_behind_a_relay_is_dialled_and_gossips_like_any_other() -> None:
    said = Said()
    async with running() as relay:
        server = RelayServer(relay.host)
        async with behind(relay, said) as (hidden, address), running() as other:
            assert parse_address(address).relay == relay.host.peer_id
            RelayClient(other.host, [], said)
            assert await other.host.connect(address) == hidden.host.peer_id
            place = {connection.peer: connection.address for connection in other.host.connections()}
            assert place[hidden.host.peer_id] == address.removesuffix(f"/p2p/{hidden.host.peer_id}")
            await hidden.subscribe()
            await other.subscribe()
            await until(lambda: hidden.host.mesh(TOPIC) == [other.host.peer_id])
            messages = [os.urandom(200_000) for _ in range(10)]
            for message in messages:
                await other.host.publish(TOPIC, message)
            await until(lambda: hidden.delivered == messages)
            assert server.circuits == 1
            # A relayed connection ends like any other, and leaves nothing behind at the relay.
            await other.host.disconnect(hidden.host.peer_id)
            await until(lambda: other.host.peer_id not in {c.peer for c in hidden.host.connections()})
            await until(lambda: server.circuits == 0)
        for node in (relay, hidden, other):
            assert not node.watcher.offences
    assert [level for level, _ in said] == ["info"]


async def test_the_relayed_address_goes_and_comes_with_the_relay() -> None:
    async with running() as relay:
        RelayServer(relay.host)
        async with behind(relay, Said()) as (hidden, address):
            relay.host.block(hidden.host.peer_id)
            await until(lambda: address not in hidden.host.addresses())
            relay.host.unblock(hidden.host.peer_id)


async def test_a_relay_that_is_none_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "RETRY_FIRST", 0.01)
    said = Said()
    async with running() as plain, running() as node, trio.open_nursery() as nursery:
        client = RelayClient(node.host, [plain.address], said)
        nursery.start_soon(client.run)
        await until(lambda: bool(said))
        await trio.sleep(0.2)
        nursery.cancel_scope.cancel()
    assert len(said) == 1
    assert "gives no place" in said[0][1]


async def test_a_relay_refuses_what_is_too_much_or_not_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "MAX_RESERVATIONS", 1)
    monkeypatch.setattr(relay_module, "PEER_CIRCUITS", 0)

    async def ask(node: Node, message: object) -> int:
        pipe = Pipe(await node.host._open_stream(relay.host.peer_id, (HOP,)))
        try:
            await pipe.say(message)
            return int((await pipe.message(HopMessage)).status)
        finally:
            await pipe.aclose()

    async with running() as relay:
        RelayServer(relay.host)
        async with behind(relay, Said()) as (hidden, _), running() as other:
            await other.host.connect(relay.address)
            assert await ask(other, HopMessage(type=HopMessage.RESERVE)) == Status.RESERVATION_REFUSED
            to = PeerId(id=parse_peer(hidden.host.peer_id).to_bytes())
            connect = HopMessage(type=HopMessage.CONNECT, peer=to)
            assert await ask(other, connect) == Status.RESOURCE_LIMIT_EXCEEDED
            connect.peer.id = parse_peer(other.host.peer_id).to_bytes()
            assert await ask(other, connect) == Status.NO_RESERVATION
            connect.peer.id = b"nonsense"
            assert await ask(other, connect) == Status.NO_RESERVATION
            pipe = Pipe(await other.host._open_stream(relay.host.peer_id, (HOP,)))
            await pipe.send_all(b"\xff" * 100)
            with pytest.raises(TransportError):
                await pipe.message(HopMessage)


async def test_nobody_is_brought_by_a_relay_that_was_not_asked() -> None:
    async with running() as relay, running() as node, running() as other:
        server = RelayServer(relay.host)
        RelayClient(node.host, [], Said())
        RelayClient(other.host, [], Said())
        await node.host.connect(relay.address)
        server._places[node.host.peer_id] = float("inf")
        with pytest.raises(TransportError, match="CONNECTION_FAILED"):
            await other.host.connect(f"{relay.address}/p2p-circuit/p2p/{node.host.peer_id}")
