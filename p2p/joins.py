"""The addresses of the configuration that a node joins a swarm by, and where they lead to."""

import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import trio

from p2p.addresses import Address

MAX_RESOLVED = 16
"""Addresses of one name that are dialled."""

Resolve = Callable[[Address], Awaitable[Sequence[Address]]]
"""The numeric addresses that a name leads to now. Raises OSError."""


@dataclass(slots=True)
class Waits:
    """How often something failed in a row, and when it may be tried again (in trio's time)."""

    failures: int = 0
    not_before: float = 0.0


@dataclass(slots=True)
class Join:
    """An address of the configuration, and the nodes that it has led to."""

    address: Address
    waits: Waits = field(default_factory=Waits)
    led_to: dict[str, str] = field(default_factory=dict)
    """Numeric address -> peer id, for an address that does not say whom it leads to."""
    unsure: set[str] = field(default_factory=set)
    """Those of these addresses that may have gone to another machine since, as that of a container does."""
    complained: bool = False

    @property
    def key(self) -> str:
        """What no second dial may run for."""
        return self.address.peer or str(self.address)

    def is_led_to(self, peer: str) -> bool:
        """Whether it is, or may be, the way to a peer."""
        return peer == self.address.peer or peer in self.led_to.values()

    def leads_to(self, address: str, peer: str) -> None:
        """Told what has just been seen."""
        while address not in self.led_to and len(self.led_to) >= 4 * MAX_RESOLVED:
            oldest = next(iter(self.led_to))
            del self.led_to[oldest]
            self.unsure.discard(oldest)
        self.led_to[address] = peer
        self.unsure.discard(address)

    def surely(self, address: str) -> str | None:
        """The peer that is at an address, as far as nothing speaks against it."""
        return None if address in self.unsure else self.led_to.get(address)


async def system_resolve(address: Address) -> list[Address]:
    """Ask the system where a name leads to now. Raises OSError."""
    families = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}
    found = await trio.socket.getaddrinfo(
        address.host, address.port, families.get(address.kind, socket.AF_UNSPEC), socket.SOCK_STREAM
    )
    # A set keeps no order; a dict does, and some resolvers answer each address several times.
    ips = dict.fromkeys(str(entry[4][0]) for entry in found)
    return [address.at(ip) for ip in ips if "%" not in ip]
