"""The node's place in the network, over libp2p. This package alone imports libp2p, and only when a host is opened.

What py-libp2p is used for: addresses, peer ids, noise, protocol negotiation, identify, and on top of it the DHT and
relays. What is replaced, since it cannot be made safe from outside: the multiplexer, connection handling and gossip.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal, NoReturn

from p2p.host.settings import HostSettings, ListenError, PortTakenError
from p2p.peerbook import Say
from p2p.settings import NetworkSettings
from p2p.transport import Observer

if TYPE_CHECKING:
    from p2p.host.finding import Found
    from p2p.host.host import Host

__all__ = ["HostSettings", "ListenError", "PortTakenError", "open_host", "reachable", "run_finding"]


@asynccontextmanager
async def open_host(settings: HostSettings, observer: Observer) -> "AsyncIterator[Host]":
    """A host that listens and gossips for the time of a block. Raises ListenError."""
    from p2p.host import host  # takes most of a second, and 80 MB

    async with host.open_host(settings, observer) as opened:
        yield opened


async def run_finding(host: "Host", settings: NetworkSettings, found: "Found", say: Say) -> NoReturn:
    """All ways of finding others and of being found, until cancelled; `found` is `p2p.discovery.Finder.found`."""
    from p2p.host import finding

    await finding.run_finding(host, settings, found, say)


def reachable(host: "Host") -> tuple[Literal["yes", "no", "unknown"], str]:
    """Whether nodes anywhere can connect to this running node, and how that is known."""
    from p2p.host import nat

    return nat.reachable(host)
