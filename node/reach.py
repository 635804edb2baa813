"""Under which addresses others can reach this machine, as far as it can tell by itself."""

import ipaddress
import socket
from collections.abc import Iterable
from typing import Literal

import psutil

from p2p.addresses import Address, parse_address

Scope = Literal["public", "private", "loopback"]

_FAMILIES = {socket.AF_INET: 4, socket.AF_INET6: 6}


def scope_of(address: Address) -> Scope:
    """From where an address can be reached: from anywhere, this local network, or this machine. Names are public."""
    if address.is_name or address.relay is not None:
        return "public"
    ip = ipaddress.ip_address(address.host)
    return "loopback" if ip.is_loopback else "public" if ip.is_global else "private"


def own_ips() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses of this machine's interfaces that are up, without those that need a zone."""
    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        if name in stats and not stats[name].isup:
            continue
        for entry in entries:
            if entry.family in _FAMILIES and "%" not in entry.address:
                ip = ipaddress.ip_address(entry.address)
                if not ip.is_link_local:
                    found.append(ip)
    return found


def dialable(addresses: Iterable[str]) -> list[Address]:
    """What others may dial, the widest scope first, each once: an unspecified host stands for all interfaces."""
    found: dict[Address, Scope] = {}
    for text in addresses:
        try:
            address = parse_address(text)
        except ValueError:
            continue
        for place in _expanded(address):
            found[place] = scope_of(place)
    order = ("public", "private", "loopback")
    return sorted(found, key=lambda place: order.index(found[place]))


def _expanded(address: Address) -> list[Address]:
    if address.is_name or not ipaddress.ip_address(address.host).is_unspecified:
        return [address]
    version = ipaddress.ip_address(address.host).version
    return [address.at(str(ip)) for ip in own_ips() if ip.version == version]
