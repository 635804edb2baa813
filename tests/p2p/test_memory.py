"""The twin of the network: what the other tests stand on."""

import pytest
import trio
from trio.testing import MockClock

from p2p.memory import MemoryNetwork
from p2p.transport import FrameTooLong, Stream, TransportError, Verdict


class Log:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def connected(self, peer: str) -> None:
        self.events.append(("connected", peer))

    def disconnected(self, peer: str) -> None:
        self.events.append(("disconnected", peer))

    def misbehaved(self, peer: str, what: str) -> None:
        self.events.append(("misbehaved", peer))


async def test_messages_flood_over_the_connections_and_come_once(nursery: trio.Nursery) -> None:
    network = MemoryNetwork(nursery)
    members = [network.join(name, Log()) for name in "abcd"]
    heard: dict[str, list[bytes]] = {name: [] for name in "abcd"}
    for member in members:

        def validate(forwarder: str, data: bytes, name: str = member.peer_id) -> Verdict:
            return Verdict.REJECT if name == "c" else Verdict.ACCEPT

        def deliver(forwarder: str, data: bytes, name: str = member.peer_id) -> None:
            heard[name].append(data)

        await member.subscribe("t", validate, deliver)
    # A ring, in which c passes nothing on.
    for one, other in ((0, 1), (1, 2), (2, 3), (3, 0)):
        await members[one].connect(members[other].addresses()[0])

    assert await members[0].publish("t", b"x") == 2
    assert await members[0].publish("t", b"x") == 2

    assert heard == {"a": [], "b": [b"x", b"x"], "c": [], "d": [b"x", b"x"]}
    assert sorted(members[0].mesh("t")) == ["b", "d"]
    network.drop_every = 1
    assert await members[0].publish("t", b"y") == 2
    assert heard["b"] == [b"x", b"x"]


async def test_a_cut_ends_connections_until_it_is_healed(nursery: trio.Nursery) -> None:
    network = MemoryNetwork(nursery)
    log = Log()
    a, b = network.join("a", log), network.join("b", Log())
    await a.connect(b.addresses()[0])
    network.cut("a", "b")
    with pytest.raises(TransportError):
        await a.connect(b.addresses()[0])
    network.heal("a", "b")
    await b.connect(a.addresses()[0])
    a.block("b")
    with pytest.raises(TransportError):
        await b.connect(a.addresses()[0])
    assert log.events == [("connected", "b"), ("disconnected", "b")] * 2
    assert not a.connections()


async def test_streams_carry_bounded_frames_and_end_with_the_connection(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    async def echo(stream: Stream) -> None:
        while True:
            await stream.send(await stream.receive(100))

    network = MemoryNetwork(nursery)
    a, b = network.join("a", Log()), network.join("b", Log())
    b.serve("/echo", echo)
    with pytest.raises(TransportError, match="not connected"):
        async with a.open("b", "/echo"):
            pass
    await a.connect(b.addresses()[0])
    async with a.open("b", "/echo") as stream:
        await stream.send(b"hallo")
        assert await stream.receive(100) == b"hallo"
        await stream.send(b"hallo")
        with pytest.raises(FrameTooLong):
            await stream.receive(4)
        with pytest.raises(TransportError, match="says nothing"):
            await stream.receive(4)
    async with a.open("b", "/echo") as stream:
        network.leave("b")
        with pytest.raises(TransportError, match="closed"):
            await stream.receive(4)
