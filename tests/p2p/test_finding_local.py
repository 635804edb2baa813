"""mDNS on loopback, UPnP with a router that is made up, and what is said of reachability."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from multiaddr import Multiaddr

from p2p.host.finding import _identified
from p2p.host.host import Host
from p2p.host.mdns import addresses_in, run_mdns
from p2p.host.nat import Reachability, run_upnp, verdict
from p2p.ids import peer_id_of
from tests.p2p.hosts import running, until

ONE, TWO, THREE = (peer_id_of(bytes([number]) * 32) for number in (1, 2, 3))


class Said(list[tuple[str, str]]):
    def __call__(self, level: str, text: str) -> None:
        self.append((level, text))


def addresses(peer: str, port: int) -> Callable[[], list[str]]:
    return lambda: [f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"]


async def test_two_nodes_of_a_swarm_hear_each_other_and_not_those_of_another() -> None:
    heard: dict[str, set[str]] = {ONE: set(), TWO: set(), THREE: set()}
    said = Said()
    threads = set(threading.enumerate())
    async with trio.open_nursery() as nursery:
        for peer, port, swarm in ((ONE, 1001, "test"), (TWO, 1002, "test"), (THREE, 1003, "other")):
            nursery.start_soon(run_mdns, swarm, peer, addresses(peer, port), heard[peer].add, said)
        with trio.move_on_after(10):
            while not said and not (heard[ONE] and heard[TWO]):
                await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    if said:
        pytest.skip(f"no multicast on loopback here: {said[0][1]}")
    assert heard == {ONE: set(addresses(TWO, 1002)()), TWO: set(addresses(ONE, 1001)()), THREE: set()}
    # Trio keeps its workers for a while.
    assert all(thread.name.startswith("Trio") for thread in set(threading.enumerate()) - threads)


async def test_where_there_is_no_multicast_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr("zeroconf.Zeroconf", refuse)
    said = Said()
    await run_mdns("test", ONE, addresses(ONE, 1001), print, said)
    assert [level for level, _ in said] == ["info"]
    assert "No such device" in said[0][1]


def test_another_machine_s_loopback_addresses_are_not_believed() -> None:
    told = [Multiaddr(f"{place}/tcp/1") for place in ("/ip4/127.0.0.1", "/ip4/10.0.0.1", "/ip6/::1", "/ip4/127.9.9.9")]
    store = SimpleNamespace(addrs=lambda peer: told)
    host = cast(Host, SimpleNamespace(libp2p=SimpleNamespace(get_peerstore=lambda: store)))
    assert [*_identified(host, ONE, near=False)] == [f"/ip4/10.0.0.1/tcp/1/p2p/{ONE}"]
    assert len([*_identified(host, ONE, near=True)]) == len(told)


def test_a_record_of_another_swarm_or_with_too_much_in_it_is_cut() -> None:
    told: dict[bytes, bytes | None] = {b"dnsaddr%d" % number: b"/ip4/10.0.0.1/tcp/1" for number in range(100)}
    assert addresses_in(told, "test") == []
    assert addresses_in(told | {b"swarm": b"other"}, "test") == []
    assert 0 < len(addresses_in(told | {b"swarm": b"test", b"dnsaddr": None}, "test")) < 20


class Router:
    """A router as miniupnpc shows it."""

    outside = "8.8.4.4"
    mapped: set[int]
    discoverdelay = 0
    lanaddr = "192.168.1.2"

    def discover(self) -> int:
        return 1

    def selectigd(self) -> None:
        return

    def externalipaddress(self) -> str:
        return self.outside

    def addportmapping(self, outside: int, protocol: str, host: str, inside: int, what: str, remote: str) -> None:
        assert (outside, protocol, host) == (inside, "TCP", self.lanaddr)
        self.mapped.add(outside)

    def deleteportmapping(self, port: int, protocol: str) -> None:
        self.mapped.remove(port)


class NoRouter(Router):
    def selectigd(self) -> None:
        raise Exception("No UPnP device discovered")


async def upnp(monkeypatch: pytest.MonkeyPatch, router: Router) -> tuple[list[str], set[int], Said]:
    """Addresses and mappings while it runs, and what was said."""
    said = Said()
    router.mapped = set()
    monkeypatch.setattr("miniupnpc.UPnP", lambda: router)
    async with running() as node, trio.open_nursery() as nursery:
        node.host.announced.append("/ip4/192.168.1.2/tcp/4747")
        nursery.start_soon(run_upnp, node.host, said)
        await until(lambda: bool(said))
        result = [address.partition("/p2p/")[0] for address in node.host.addresses()], set(router.mapped), said
        nursery.cancel_scope.cancel()
    return result


async def test_a_port_that_the_router_forwards_is_announced_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router()
    announced, mapped, said = await upnp(monkeypatch, router)
    assert "/ip4/8.8.4.4/tcp/4747" in announced
    assert mapped == {4747}
    assert router.mapped == set()
    assert "forwards" in said[0][1]


@pytest.mark.parametrize(("router", "words"), [(NoRouter(), "no router here"), (Router(), "another NAT")])
async def test_a_router_that_is_of_no_use_is_said_once(
    monkeypatch: pytest.MonkeyPatch, router: Router, words: str
) -> None:
    router.outside = "10.0.0.1"
    announced, _, said = await upnp(monkeypatch, router)
    assert not any("8.8.4.4" in address or "/10.0.0.1/" in address for address in announced)
    assert len(said) == 1
    assert words in said[0][1]


@pytest.mark.parametrize(
    ("known", "answer", "words"),
    [
        (Reachability((f"/ip4/192.168.1.2/tcp/4747/p2p/{ONE}",), True, ()), "yes", "dialled this one"),
        (
            Reachability((f"/ip4/8.8.4.4/tcp/4747/p2p/{TWO}/p2p-circuit/p2p/{ONE}",), False, ()),
            "yes",
            "relay /ip4/8.8.4.4",
        ),
        (Reachability((f"/ip4/8.8.4.4/tcp/4747/p2p/{ONE}",), False, ()), "unknown", "friend to dial /ip4/8.8.4.4"),
        (Reachability((f"/ip4/127.0.0.1/tcp/4747/p2p/{ONE}",), False, ()), "no", "loopback"),
        (
            Reachability((f"/ip4/192.168.1.2/tcp/4747/p2p/{ONE}",), False, ("/ip4/8.8.4.4/tcp/61000",)),
            "unknown",
            "forwards TCP port 4747",
        ),
        (Reachability((f"/ip4/192.168.1.2/tcp/4747/p2p/{ONE}",), False, ()), "unknown", "from the local network"),
    ],
)
def test_what_is_said_of_reachability(known: Reachability, answer: str, words: str) -> None:
    said, why = verdict(known)
    assert said == answer
    assert words in why
