"""Where a node can be reached: the multiaddrs of this protocol, read and written as text.

/ip4/203.0.113.7/tcp/4747/p2p/12D3KooW...
/dns4/node.example.org/tcp/4747
/ip4/203.0.113.7/tcp/4747/p2p/<relay>/p2p-circuit/p2p/12D3KooW...
"""

import ipaddress
import re
from dataclasses import dataclass, replace
from typing import Literal, cast

from p2p.ids import public_key_of
from p2p.settings import NetworkSettings

MAX_ADDRESS = 512
"""Characters in an address; a name has at most 253, a peer id 52."""

Kind = Literal["ip4", "ip6", "dns", "dns4", "dns6"]

_SHAPE = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/(?P<port>[0-9]{1,5})"
    r"(/p2p/(?P<first>[^/]+)(?P<circuit>/p2p-circuit(/p2p/(?P<second>[^/]+))?)?)?"
)
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?")


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address, the node that is expected there, and the relay before it, if any."""

    kind: Kind
    host: str
    port: int
    peer: str | None = None
    relay: str | None = None

    def __str__(self) -> str:
        parts = [self.base]
        if self.relay is not None:
            parts.append(f"/p2p/{self.relay}/p2p-circuit")
        if self.peer is not None:
            parts.append(f"/p2p/{self.peer}")
        return "".join(parts)

    @property
    def base(self) -> str:
        """The address of the machine alone."""
        return f"/{self.kind}/{self.host}/tcp/{self.port}"

    @property
    def is_name(self) -> bool:
        """Whether the host is a name, which may lead somewhere else every time."""
        return self.kind not in ("ip4", "ip6")

    def of(self, peer: str) -> "Address":
        """The same place, where `peer` is expected."""
        return replace(self, peer=peer)

    def at(self, ip: str) -> "Address":
        """The same with a numeric IP address for the host. Raises ValueError if it is none."""
        parsed = ipaddress.ip_address(ip)
        return replace(self, kind="ip4" if parsed.version == 4 else "ip6", host=str(parsed))


def parse_address(text: str) -> Address:
    """The address in `text`. Raises ValueError, whose message says what is wrong and what is expected."""
    shown = repr(text if len(text) <= 100 else f"{text[:97]}...")
    if len(text) > MAX_ADDRESS:
        raise ValueError(f"{shown} is too long for an address: {len(text)} characters")
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{shown} is not an address that swarmnode can use: write /ip4/<address>/tcp/<port>, /ip6/... or"
            " /dns4/<name>/tcp/<port>, with /p2p/<peer id> behind it where a certain node is meant"
        )
    kind, host, port = cast(Kind, match["kind"]), match["host"], int(match["port"])
    if port > 65535:
        raise ValueError(f"{shown}: there is no port {port}")
    host = _host(kind, host, shown)
    ids = [peer for peer in (match["first"], match["second"]) if peer is not None]
    for peer in ids:
        _check_peer(peer, shown)
    if match["circuit"]:
        return Address(kind, host, port, peer=match["second"], relay=match["first"])
    return Address(kind, host, port, peer=match["first"])


def leads_here(address: str) -> bool:
    """Whether an address leads whoever dials it to itself: loopback, also in disguise, or no host at all."""
    try:
        parsed = parse_address(address)
    except ValueError:
        return False
    if parsed.is_name:
        return False
    ip = ipaddress.ip_address(parsed.host)
    plain = getattr(ip, "ipv4_mapped", None) or ip
    return bool(plain.is_loopback or plain.is_unspecified)


def check_addresses(settings: NetworkSettings) -> None:
    """Raises ValueError, naming the key, for the first address of the settings that cannot be used as it is meant."""
    for key in ("join", "listen", "announce", "relay"):
        for text in cast(list[str], getattr(settings, key)):
            try:
                problem = _unfit(key, parse_address(text))
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from error
            if problem:
                raise ValueError(f"{key}: {text!r} {problem}")


def _unfit(key: str, address: Address) -> str | None:
    if key == "listen":
        if address.is_name:
            return "has a name: a node listens on an IP address of its own, such as /ip4/0.0.0.0/tcp/4747"
        if address.peer or address.relay:
            return "names a peer: write it without /p2p/..."
        return None
    if address.port == 0:
        return "has port 0, which nobody can dial"
    if key == "relay" and (address.peer is None or address.relay is not None):
        return "does not say which relay it is: append /p2p/<peer id of the relay>"
    if address.relay is not None and address.peer is None:
        return "does not say whom the relay shall reach: append /p2p/<peer id>"
    return None


def _host(kind: Kind, host: str, shown: str) -> str:
    if kind in ("dns", "dns4", "dns6"):
        if not _NAME.fullmatch(host):
            raise ValueError(f"{shown}: {host!r} is not a host name")
        return host.lower()
    try:
        ip = ipaddress.IPv4Address(host) if kind == "ip4" else ipaddress.IPv6Address(host)
    except ValueError as error:
        raise ValueError(f"{shown}: {error}") from error
    if "%" in host:
        raise ValueError(f"{shown}: an address with a zone means something on one machine only")
    return str(ip)


def _check_peer(peer: str, shown: str) -> None:
    try:
        public_key_of(peer)
    except ValueError as error:
        raise ValueError(f"{shown}: {peer!r} is not a peer id of this protocol ({error})") from error
