"""Can others reach this node? What is tried for it (UPnP), and what is known about it."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import miniupnpc
import trio

from p2p.addresses import Address, parse_address
from p2p.host.host import Host
from p2p.host.threads import in_thread
from p2p.peerbook import Say

RENEW_SECONDS = 1200.0
"""A router that was started anew has forgotten its mappings."""

_DISCOVER_MS = 2000
_UNMAP_SECONDS = 2.0


class UpnpError(Exception):
    """No port was forwarded. The message says why, for the operator."""


class _Router:
    """The blocking half, called from worker threads, one at a time."""

    def __init__(self) -> None:
        self._gateway: Any = miniupnpc.UPnP()
        self._gateway.discoverdelay = _DISCOVER_MS
        self._mapped: set[int] = set()
        self._found = False

    def forward(self, port: int) -> str:
        """Forward a TCP port of the router to the same one here. Returns the router's public IP. Raises UpnpError."""
        # miniupnpc raises bare Exception for whatever a router answers.
        try:
            if not self._found:
                self._gateway.discover()
                self._gateway.selectigd()
                self._found = True
            outside = str(self._gateway.externalipaddress())
            self._gateway.addportmapping(port, "TCP", self._gateway.lanaddr, port, "swarmnode", "")
        except Exception as error:
            self._found = False
            raise UpnpError(f"no router here forwards a port ({error})") from error
        self._mapped.add(port)
        if not _is_public(outside):
            raise UpnpError(f"the router has no public address itself ({outside}): there is another NAT behind it")
        return outside

    def forget(self) -> None:
        """Take the mappings back."""
        for port in self._mapped:
            try:
                self._gateway.deleteportmapping(port, "TCP")
            except Exception:  # noqa: BLE001  as above; the router keeps it, which harms nobody
                return


async def run_upnp(host: Host, say: Say) -> NoReturn:
    """Have the router forward this node's ports, and announce the public address; the result is said once."""
    router, said = _Router(), ""
    try:
        while True:
            for port in sorted(_private_ports(host.addresses())):
                try:
                    outside = await in_thread(router.forward, port)
                except UpnpError as error:
                    message = f"UPnP: {error}"
                else:
                    address = f"/ip{ipaddress.ip_address(outside).version}/{outside}/tcp/{port}"
                    if address not in host.announced:
                        host.announced.append(address)
                    message = f"UPnP: the router forwards {address} to this node"
                if message != said:
                    say("info", message)
                    said = message
            await trio.sleep(RENEW_SECONDS)
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(_UNMAP_SECONDS):
            await in_thread(router.forget)


def _private_ports(addresses: Sequence[str]) -> set[int]:
    """Ports on addresses behind a NAT: IPv4, neither public nor of this machine alone."""
    ports = set()
    for address in map(parse_address, addresses):
        if address.kind == "ip4" and address.relay is None:
            ip = ipaddress.ip_address(address.host)
            if ip.is_private and not ip.is_loopback:
                ports.add(address.port)
    return ports


@dataclass(frozen=True, slots=True)
class Reachability:
    """What is known. `observed` are public addresses that peers have seen this node come from."""

    addresses: tuple[str, ...]
    came_in: bool
    observed: tuple[str, ...]


def reachable(host: Host) -> tuple[Literal["yes", "no", "unknown"], str]:
    """Whether nodes anywhere can connect to this running node, and how that is known."""
    came_in = any(
        not connection.outbound and _is_public(_host_of(connection.address)) for connection in host.connections()
    )
    return verdict(Reachability(tuple(host.addresses()), came_in, tuple(observed(host))))


def verdict(known: Reachability) -> tuple[Literal["yes", "no", "unknown"], str]:
    """See `reachable`."""
    if known.came_in:
        return "yes", "a node from outside the local network is connected that dialled this one"
    places = [parse_address(text) for text in known.addresses]
    if relayed := [place for place in places if place.relay is not None]:
        return "yes", f"through the relay {relayed[0].base}"
    public = [place for place in places if place.is_name or _is_public(place.host)]
    if public:
        return "unknown", f"it has a public address, but nobody has dialled it yet: ask a friend to dial {public[0]}"
    if places and all(ipaddress.ip_address(place.host).is_loopback for place in places):
        return "no", "it listens on loopback, so it is reached from this machine alone"
    if known.observed:
        port = places[0].port if places else 0
        return "unknown", (
            f"it stands behind a NAT: others see it as {known.observed[0]}. If the router forwards TCP port {port}, put"
            " that address, with this port, into [network] announce and ask a friend to dial it"
        )
    dial = str(places[0]) if places else "it"
    return "unknown", f"it has no public address of its own; from the local network, ask a friend to dial {dial}"


def observed(host: Host) -> list[str]:
    """Public addresses, as at least four peers have seen them: libp2p believes no fewer."""
    manager = host.libp2p._observed_addr_manager
    found = [] if manager is None else [str(address) for address in manager.addrs()]
    return [address for address in found if _is_public(_host_of(address))]


def _host_of(address: str) -> str:
    try:
        parsed: Address = parse_address(address)
    except ValueError:
        return ""
    return "" if parsed.relay is not None else parsed.host


def _is_public(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False
