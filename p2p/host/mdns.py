"""Finding nodes of the same swarm on the local network, by multicast DNS.

Each node announces a service of type `_swarmnode._udp` whose TXT record holds the swarm's name and the node's
multiaddrs. Used is zeroconf, which libp2p brings along; libp2p's own layer above it blocks, and changes the peer store
from a thread.
"""

import ipaddress
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import trio
import zeroconf

from p2p.addresses import Address, parse_address
from p2p.host.threads import in_thread
from p2p.peerbook import Say

SERVICE = "_swarmnode._udp.local."

REFRESH_SECONDS = 30.0
"""How often this node looks whether its addresses have changed."""

_MAX_ADDRESSES = 8
_MAX_WAITING = 256
_REQUEST_MS = 3000
_CLOSE_SECONDS = 2.0

Found = Callable[[str], None]
"""Told of a multiaddr with a peer id, in the event loop."""


class _Inbox:
    """Takes what zeroconf's threads hear to the event loop; what is too much is dropped."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._heard: deque[Any] = deque(maxlen=_MAX_WAITING)
        self._some = trio.Event()

    def put(self, properties: dict[bytes, bytes | None]) -> None:
        """From any thread."""
        self._heard.append(properties)
        try:
            self._token.run_sync_soon(self._wake, idempotent=True)
        except trio.RunFinishedError:
            self._heard.clear()

    def _wake(self) -> None:
        self._some.set()

    async def take(self) -> list[dict[bytes, bytes | None]]:
        """All that was heard since the last call, as soon as there is any."""
        await self._some.wait()
        self._some = trio.Event()
        taken = []
        while self._heard:
            taken.append(self._heard.popleft())
        return taken


class _Service:
    """The blocking half, called from worker threads, one at a time."""

    def __init__(self, swarm: str, peer: str, inbox: _Inbox) -> None:
        self._swarm = swarm
        self._peer = peer
        self._inbox = inbox
        self._zeroconf: Any = None
        self._browser: Any = None
        self._announced: Any = None
        self._closed = threading.Event()
        self._opening = threading.Lock()

    def open(self, addresses: Sequence[Address]) -> None:
        """Listen and announce. Raises OSError, zeroconf.Error."""
        with self._opening:
            if not self._closed.is_set():
                self._open(addresses)

    def _open(self, addresses: Sequence[Address]) -> None:
        local = all(ipaddress.ip_address(address.host).is_loopback for address in addresses)
        self._zeroconf = zeroconf.Zeroconf(interfaces=["127.0.0.1"] if local else zeroconf.InterfaceChoice.All)
        self._browser = zeroconf.ServiceBrowser(self._zeroconf, SERVICE, handlers=[self._changed])
        self.announce(addresses)

    def announce(self, addresses: Sequence[Address]) -> None:
        """Announce these instead of earlier ones. Raises OSError, zeroconf.Error."""
        info = self._info(addresses)
        if self._announced is None:
            self._zeroconf.register_service(info)
        else:
            self._zeroconf.update_service(info)
        self._announced = info

    def close(self) -> None:
        """Withdraw the announcement and stop all threads."""
        self._closed.set()
        with self._opening:
            if self._browser is not None:
                self._browser.cancel()
            if self._zeroconf is not None:
                self._zeroconf.close()

    def _info(self, addresses: Sequence[Address]) -> Any:
        properties = {"swarm": self._swarm}
        for number, address in enumerate(addresses):
            properties["dnsaddr" if number == 0 else f"dnsaddr{number + 1}"] = str(address)
        hosts = dict.fromkeys(address.host for address in addresses)
        return zeroconf.ServiceInfo(
            SERVICE,
            f"{self._peer}.{SERVICE}",
            port=addresses[0].port,
            properties=properties,
            server=f"{self._peer}.local.",
            parsed_addresses=list(hosts),
        )

    def _changed(self, zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        """Called in the browser's thread, where it may wait."""
        if state_change.name == "Removed" or name == f"{self._peer}.{SERVICE}" or self._closed.is_set():
            return
        info = _info_of(zeroconf, service_type, name)
        if info is not None and not self._closed.is_set():
            self._inbox.put(dict(info.properties))


def _info_of(instance: Any, service_type: str, name: str) -> Any:
    try:
        return instance.get_service_info(service_type, name, timeout=_REQUEST_MS)
    except (OSError, zeroconf.Error, RuntimeError):  # RuntimeError: its event loop has ended meanwhile
        return None


async def run_mdns(swarm: str, peer: str, addresses: Callable[[], Sequence[str]], found: Found, say: Say) -> None:
    """Announce `addresses()` of this node and tell of others, until cancelled. Returns, with a line said, where the
    local network has no multicast."""
    _quieten()
    inbox = _Inbox()
    service = _Service(swarm, peer, inbox)
    own = _local(addresses())
    if not own:
        return
    try:
        await in_thread(service.open, own)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_hear, swarm, peer, inbox, found)
            await _keep_announcing(service, own, addresses)
    except* (OSError, zeroconf.Error) as group:
        reason = group.exceptions[0]
        say("info", f"nodes on the local network are not looked for: mDNS does not work here ({reason})")
    finally:
        with trio.CancelScope(shield=True), trio.move_on_after(_CLOSE_SECONDS):
            await in_thread(service.close)


async def _hear(swarm: str, peer: str, inbox: _Inbox, found: Found) -> None:
    while True:
        for properties in await inbox.take():
            for address in addresses_in(properties, swarm):
                if not address.endswith(f"/p2p/{peer}"):
                    found(address)
        # Whatever floods the local network, the event loop gets its turn.
        await trio.sleep(0.1)


async def _keep_announcing(service: _Service, own: list[Address], addresses: Callable[[], Sequence[str]]) -> None:
    while True:
        await trio.sleep(REFRESH_SECONDS)
        if (current := _local(addresses())) and current != own:
            own = current
            await in_thread(service.announce, own)


def addresses_in(properties: dict[bytes, bytes | None], swarm: str) -> list[str]:
    """The multiaddrs in a TXT record, if it is one of this swarm's; they are not checked further than their count."""
    if properties.get(b"swarm") != swarm.encode():
        return []
    told = [value for key, value in properties.items() if key.startswith(b"dnsaddr") and value]
    return [value.decode("ascii", "replace") for value in told[:_MAX_ADDRESSES]]


def _local(addresses: Sequence[str]) -> list[Address]:
    """Those to announce: numeric and direct; loopback ones only where there are no others."""
    parsed = [parse_address(text) for text in addresses]
    direct = [address for address in parsed if not address.is_name and address.relay is None]
    outside = [address for address in direct if not ipaddress.ip_address(address.host).is_loopback]
    return (outside or direct)[:_MAX_ADDRESSES]


def _quieten() -> None:
    """zeroconf warns of every malformed packet that somebody on the network sends."""
    logger = logging.getLogger("zeroconf")
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
