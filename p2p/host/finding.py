"""All ways of a host of finding others and of being found, started together."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NoReturn

import trio
from libp2p.peer.peerstore import PeerStoreError

from p2p.addresses import leads_here
from p2p.gossip import shards_heard
from p2p.host.dht import Dht, run_dht
from p2p.host.host import Host
from p2p.host.mdns import run_mdns
from p2p.host.nat import run_upnp
from p2p.host.network import parse_peer
from p2p.host.relay import RelayClient, RelayServer
from p2p.peerbook import Say
from p2p.settings import NetworkSettings

logger = logging.getLogger(__name__)

IDENTIFY_SECONDS = 10.0
_TOLD_BY_PEER = 8

Found = Callable[[str, Literal["mdns", "dht", "identify"]], None]
"""`p2p.discovery.Finder.found`."""


async def run_finding(host: Host, settings: NetworkSettings, found: Found, say: Say) -> NoReturn:
    """mDNS, the DHT, relays and UPnP, each as the settings want it, until cancelled. None of them is ever needed."""
    async with trio.open_nursery() as nursery:
        client = RelayClient(host, settings.relay, say)
        nursery.start_soon(client.run)
        nursery.start_soon(_tell_identified, host, found)
        if settings.serve_relay:
            RelayServer(host)
        if settings.mdns:
            nursery.start_soon(run_mdns, settings.swarm, host.peer_id, host.addresses, _from(found, "mdns"), say)
        if settings.dht:
            heard = shards_heard(host.peer_id, settings.shards, settings.subscribe)
            dht = Dht(host, settings.swarm, settings.max_peers, settings.shards, heard)
            nursery.start_soon(run_dht, dht, host, _from(found, "dht"))
        if settings.upnp:
            nursery.start_soon(run_upnp, host, say)
        await trio.sleep_forever()
    raise AssertionError("the sleep above never ends")


def _from(found: Found, source: Literal["mdns", "dht", "identify"]) -> Callable[[str], None]:
    return partial(_tell, found, source)


def _tell(found: Found, source: Literal["mdns", "dht", "identify"], address: str) -> None:
    found(address, source)


async def _tell_identified(host: Host, found: Found) -> NoReturn:
    """Pass on under which addresses connected peers say they listen, for when they are lost."""
    while True:
        await trio.sleep(IDENTIFY_SECONDS)
        for connection in host.connections():
            for address in _identified(host, connection.peer, near=leads_here(connection.address)):
                found(address, "identify")


def _identified(host: Host, peer: str, near: bool) -> Iterator[str]:
    try:
        told = host.libp2p.get_peerstore().addrs(parse_peer(peer))
    except PeerStoreError:
        return
    for address in map(str, told[:_TOLD_BY_PEER]):
        text = address.removesuffix(f"/p2p/{peer}")
        # Another machine's loopback address leads to this machine.
        if near or not leads_here(text):
            yield f"{text}/p2p/{peer}"
