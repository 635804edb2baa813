"""Hosts that behave: they find each other, gossip, talk on streams and part."""

import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.host import HostSettings, ListenError, PortTakenError, open_host
from p2p.host.settings import MAX_MESSAGE
from p2p.transport import Stream, TransportError
from tests.p2p.hosts import TOPIC, Node, Watcher, meshed, running, until


async def test_three_hosts_in_a_line_pass_messages_on_and_deliver_each_once() -> None:
    async with running() as a, running() as b, running() as c:
        await meshed(a, b, c)
        assert await a.host.publish(TOPIC, b"from one end") == 1
        await until(lambda: b.delivered and c.delivered)
        assert await c.host.publish(TOPIC, bytes(MAX_MESSAGE)) == 1
        await until(lambda: len(a.delivered) == 1)
        assert (a.delivered, c.delivered) == ([bytes(MAX_MESSAGE)], [b"from one end"])
        assert b.delivered == [b"from one end", bytes(MAX_MESSAGE)]
        assert b.host.subscribers(TOPIC) == sorted([a.host.peer_id, c.host.peer_id])
        assert not a.watcher.offences + b.watcher.offences + c.watcher.offences


async def test_a_message_over_two_paths_is_delivered_once() -> None:
    async with running() as a, running() as b, running() as c:
        await meshed(a, b, c, a)
        messages = [bytes([number]) * 3000 for number in range(50)]
        for message in messages:
            await a.host.publish(TOPIC, message)
        await until(lambda: len(b.delivered) >= 50 and len(c.delivered) >= 50)
        await trio.sleep(0.2)
        assert sorted(b.delivered) == sorted(c.delivered) == messages
        assert a.delivered == []


async def test_a_burst_reaches_a_subscriber_whole_and_a_late_joiner_survives_it() -> None:
    async with running() as a, running() as b, running() as late:
        await meshed(a, b)
        await late.subscribe()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(late.host.connect, a.address)
            for number in range(300):
                await a.host.publish(TOPIC, number.to_bytes(2, "big") * 32768)
        await until(lambda: len(b.delivered) == 300)
        count = len(late.delivered)
        await until(lambda: late.host.mesh(TOPIC))
        await a.host.publish(TOPIC, b"after the burst")
        await until(lambda: len(late.delivered) > count and late.delivered[-1] == b"after the burst")
        assert not late.watcher.offences + b.watcher.offences


async def test_a_message_too_large_for_peers_is_refused_before_it_is_sent() -> None:
    async with running() as a:
        await a.subscribe()
        with pytest.raises(ValueError, match="bytes"):
            await a.host.publish(TOPIC, bytes(MAX_MESSAGE + 1))


async def test_streams_carry_frames_of_any_size_and_refuse_what_is_too_long() -> None:
    async with running() as a, running() as b:

        async def echo(stream: Stream) -> None:
            while True:
                await stream.send(await stream.receive(2**24))

        b.host.serve("/echo/1", echo)
        await a.host.connect(b.address)
        frames = [b"", b"x", os.urandom(65536), os.urandom(9 * 2**20)]
        async with a.host.open(b.host.peer_id, "/echo/1") as stream:
            assert stream.peer == b.host.peer_id
            for frame in frames:
                await stream.send(frame)
                assert await stream.receive(2**24) == frame
            await stream.send(b"12345")
            with pytest.raises(TransportError, match="5 bytes where 4"):
                await stream.receive(4)
        with pytest.raises(TransportError):
            async with a.host.open(b.host.peer_id, "/nobody/answers"):
                pass
        await until(lambda: "/echo/1" in a.host.protocols(b.host.peer_id))


async def test_a_failing_handler_ends_its_stream_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as a, running() as b:

        async def fail(stream: Stream) -> None:
            raise RuntimeError("a bug in the handler")

        b.host.serve("/fail/1", fail)
        await meshed(a, b)
        with pytest.raises(TransportError):
            async with a.host.open(b.host.peer_id, "/fail/1") as stream:
                await stream.receive(10)
        assert "a bug in the handler" in caplog.text

        def boom(_data: bytes) -> None:
            raise RuntimeError("a bug in the delivery")

        b.take = boom  # type: ignore[method-assign, assignment]
        await a.host.publish(TOPIC, b"first")
        await until(lambda: "a bug in the delivery" in caplog.text)
        del b.take
        await a.host.publish(TOPIC, b"second")
        await until(lambda: b.delivered == [b"second"])


async def test_connecting_is_idempotent_and_checks_who_answers() -> None:
    async with running() as a, running() as b:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(a.host.connect, b.address)
        assert await a.host.connect(b.address) == b.host.peer_id
        assert [(one.peer, one.outbound) for one in a.host.connections()] == [(b.host.peer_id, True)]
        assert [(one.peer, one.outbound) for one in b.host.connections()] == [(a.host.peer_id, False)]
        stranger = b.address.rpartition("/")[0] + "/12D3KooWAWyj7fckjh3q2UuYD9Rx3qKbFNGrLUDgv2VvX2uRB7ES"
        for wrong in (
            stranger,
            a.address,
            "nonsense",
            "/ip4/127.0.0.1/tcp/1/p2p/nonsense",
            f"{b.address}/nonsense",
        ):
            with pytest.raises(TransportError):
                await a.host.connect(wrong)
        await a.host.disconnect(b.host.peer_id)
        await until(lambda: not b.host.connections())
        assert a.watcher.connections == a.watcher.disconnections == [b.host.peer_id]
        assert b.watcher.connections == b.watcher.disconnections == [a.host.peer_id]
        await b.host.connect(a.address)
        assert a.watcher.connections == [b.host.peer_id] * 2


async def test_a_refused_connection_is_an_error_that_says_why() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        async with running() as a, running() as b:
            with pytest.raises(TransportError, match="refused"):
                await a.host.connect(f"{address}/p2p/{b.host.peer_id}")


async def test_no_more_peers_than_allowed_connect() -> None:
    async with running(max_peers=1) as full, running() as a, running() as b:
        await a.host.connect(full.address)
        with suppress(TransportError):  # refused at once, or just after
            await b.host.connect(full.address)
        await until(lambda: not b.host.connections())
        assert [one.peer for one in full.host.connections()] == [a.host.peer_id]
        with pytest.raises(TransportError, match="most allowed"):
            await full.host.connect(b.address)
        await a.host.disconnect(full.host.peer_id)
        await until(lambda: not full.host.connections())
        await b.host.connect(full.address)
        await until(lambda: [one.peer for one in full.host.connections()] == [b.host.peer_id])


async def test_a_private_host_takes_nobody_else() -> None:
    async with (
        running() as friend,
        running() as stranger,
        running(allow=frozenset({friend.host.peer_id})) as private,
    ):
        await friend.host.connect(private.address)
        await until(lambda: private.host.connections())
        with pytest.raises(TransportError, match="not on the list"):
            await private.host.connect(stranger.address)
        with suppress(TransportError):
            await stranger.host.connect(private.address)
        await until(lambda: not stranger.host.connections())
        assert private.watcher.connections == [friend.host.peer_id]


async def test_a_blocked_peer_is_cut_off_and_its_messages_dropped_whoever_passes_them_on() -> None:
    async with running() as a, running() as b, running() as c:
        await meshed(a, b, c)
        c.host.block(a.host.peer_id)
        b_sees = b.delivered
        await a.host.publish(TOPIC, b"from the blocked")
        await b.host.publish(TOPIC, b"from another")
        await until(lambda: c.delivered and b_sees)
        assert c.delivered == [b"from another"]
        assert b_sees == [b"from the blocked"]
        with pytest.raises(TransportError, match="blocked"):
            await c.host.connect(a.address)
        b.host.block(a.host.peer_id)
        await until(lambda: not a.host.connections())
        b.host.unblock(a.host.peer_id)
        c.host.unblock(a.host.peer_id)
        await c.host.connect(a.address)
        await until(lambda: c.host.peer_id in a.host.mesh(TOPIC))
        await a.host.publish(TOPIC, b"forgiven")
        await until(lambda: b"forgiven" in c.delivered)


async def test_addresses_that_cannot_be_listened_on_are_named() -> None:
    async with running() as a:
        taken = a.address.partition("/p2p/")[0]
        for listen, error in (
            (taken, PortTakenError),
            ("nonsense", ListenError),
            ("/ip4/127.0.0.1", ListenError),
            ("/ip4/127.0.0.1/udp/1/quic-v1", ListenError),
            ("/ip4/192.0.2.1/tcp/0", ListenError),
        ):
            with pytest.raises(error, match=listen):
                async with open_host(HostSettings(Ed25519PrivateKey.generate(), listen=(listen,)), Watcher()):
                    pass


def _meshed(a: Node, b: Node) -> bool:
    return a.host.mesh(TOPIC) == [b.host.peer_id] and b.host.mesh(TOPIC) == [a.host.peer_id]


def _has_got(node: Node, count: int) -> bool:
    return len(node.delivered) == count


async def test_a_peer_that_comes_back_is_the_same_peer_at_once() -> None:
    key = Ed25519PrivateKey.generate()
    async with running() as a:
        await a.subscribe()
        for run in range(3):
            async with running(key=key) as b:
                await b.subscribe()
                await b.host.connect(a.address)
                await until(partial(_meshed, a, b))
                await b.host.publish(TOPIC, b"same bytes each time")
                await until(partial(_has_got, a, run + 1))
            await until(lambda: not a.host.connections())


async def test_a_peer_that_comes_back_before_its_loss_is_digested_is_asked_anew_what_it_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as a, running() as b:
        b.host.serve("/echo/1", lambda stream: stream.send(b""))
        await b.host.connect(a.address)
        await until(lambda: "/echo/1" in a.host.protocols(b.host.peer_id))
        told = a.host.network.notify_disconnected

        async def late(conn: object) -> None:
            await trio.sleep(0.5)
            await told(conn)

        monkeypatch.setattr(a.host.network, "notify_disconnected", late)
        await b.host.disconnect(a.host.peer_id)
        await until(lambda: not a.host.connections() and not b.host.connections())
        await b.host.connect(a.address)
        await until(lambda: "/echo/1" in a.host.protocols(b.host.peer_id))
        await trio.sleep(0.6)
        assert "/echo/1" in a.host.protocols(b.host.peer_id)


async def test_blocking_what_is_no_peer_harms_nothing() -> None:
    async with running() as a, running() as b:
        a.host.block("nonsense")
        await meshed(a, b)


async def test_a_host_on_all_interfaces_names_addresses_that_can_be_dialled() -> None:
    async with running(listen=("/ip4/0.0.0.0/tcp/0",), announce=("/dns4/node.example/tcp/4747",)) as a, running() as b:
        assert a.address == f"/dns4/node.example/tcp/4747/p2p/{a.host.peer_id}"
        assert not any("0.0.0.0" in address for address in a.host.addresses())
        local = next(address for address in a.host.addresses() if "/127.0.0.1/" in address)
        assert await b.host.connect(local) == a.host.peer_id


async def test_closing_is_quick_and_leaves_nothing_behind(capfd: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("p2p").info("before")
    async with running() as a:
        with trio.fail_after(4):
            async with running() as b, running() as c:
                await meshed(b, a, c)
                port = int(b.address.split("/")[4])
                start = trio.current_time()
            assert trio.current_time() - start < 3
        await until(lambda: not a.host.connections())
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
        with pytest.raises(ZeroDivisionError):
            await _fail_with_a_peer(a)
    assert capfd.readouterr().err == ""


async def _fail_with_a_peer(a: Node) -> None:
    async with running() as d:
        await d.host.connect(a.address)
        _ = 1 / 0


_CHILD = """
import sys, trio
from tests.p2p.hosts import running
async def main():
    async with running() as node:
        await node.subscribe()
        await node.host.connect(sys.argv[1])
        await trio.sleep_forever()
trio.run(main)
"""


async def test_a_peer_that_dies_or_falls_silent_is_noticed() -> None:
    async with running(ping_seconds=0.3) as a:
        await a.subscribe()
        command = [sys.executable, "-c", _CHILD, a.address]
        children = [subprocess.Popen(command) for _ in range(2)]
        try:
            await until(lambda: len(a.host.mesh(TOPIC)) == 2, 30)
            for child, end in zip(children, (signal.SIGKILL, signal.SIGSTOP), strict=True):
                child.send_signal(end)
            await until(lambda: not a.host.connections())
            assert a.host.mesh(TOPIC) == a.host.subscribers(TOPIC) == []
        finally:
            for child in children:
                child.kill()
                child.wait()
        assert sorted(a.watcher.connections) == sorted(a.watcher.disconnections)


def test_the_package_alone_does_not_import_libp2p() -> None:
    code = "import sys, p2p.host; sys.exit(any(name.startswith('libp2p') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_stream_whose_opening_is_cancelled_is_gone_at_both_ends() -> None:
    async with running() as a, running() as b:
        await a.host.connect(b.address)
        await until(lambda: a.watcher.connections and b.watcher.connections)
        ends = [connection for node in (a, b) for (connection,) in node.host.network.connections.values()]
        before = max(len(end.muxed_conn.streams) for end in ends)
        for _ in range(20):
            with trio.CancelScope() as scope:
                scope.cancel()
                await ends[0].new_stream()
        await until(lambda: all(len(end.muxed_conn.streams) < before + 10 for end in ends))
        assert all(len(end.streams) < before + 10 for end in ends)
