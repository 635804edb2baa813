"""The part of `swarmnode doctor` about the network. It connects to nobody: what it says, this machine knows."""

import errno
import importlib
import importlib.metadata
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from node.config import Config
from node.datadir import DataDir
from node.errors import NodeError
from node.reach import dialable, scope_of
from node.snapshot import Snapshot, read_snapshot
from p2p.addresses import Address, parse_address


@dataclass(frozen=True, slots=True)
class Check:
    """One line. `fail` keeps a node from running, `note` does not; both say what to do."""

    name: str
    state: Literal["ok", "note", "fail"]
    text: str


def check_network(config: Config) -> Iterator[Check]:
    """Whether a node can open its network here, and who can reach it."""
    if config.sharing.silo:
        yield Check("network", "ok", "none: [sharing] silo is on, so the node trains alone and opens no port")
        return
    library = _library()
    yield library
    running = _running(config)
    listen = [parse_address(text) for text in config.network.listen]
    if running is None:
        yield from (_port(address, "listen" in config.network.model_fields_set) for address in listen)
        places = dialable([*config.network.announce, *config.network.listen])
    else:
        nodes = f"{running.connected} node{'' if running.connected == 1 else 's'}"
        yield Check("port", "ok", f"the node runs in swarm {running.swarm} and is connected to {nodes}")
        places = dialable(running.addresses)
    if running is not None and running.reachable_why:
        state: Literal["ok", "note"] = "ok" if running.reachable == "yes" else "note"
        yield Check("reach", state, f"{running.reachable}: {running.reachable_why}")
    else:
        yield _reach(config, places)
    if config.network.mdns:
        yield _mdns(places)


def _library() -> Check:
    versions = []
    for name in ("libp2p", "protobuf"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            return Check("network", "fail", f"{name} is not installed: install swarmnode anew")
    text = ", ".join(versions)
    try:
        importlib.import_module("libp2p")
    except (ImportError, TypeError) as error:  # generated code of another protobuf raises a TypeError
        return Check("network", "fail", f"{text}: cannot be used together ({error}): install swarmnode anew")
    return Check("network", "ok", text)


def _running(config: Config) -> Snapshot | None:
    data = DataDir(config.node.data_dir)
    try:
        return read_snapshot(data.swarm_path, data.running())
    except NodeError:
        return None  # the check of the data directory says so


def _port(address: Address, is_chosen: bool) -> Check:
    """Whether the node could listen there now."""
    problem = _bind(address)
    if problem is None:
        return Check("port", "ok", f"{address.base} is free")
    if problem == errno.EADDRINUSE and not is_chosen:
        return Check("port", "note", f"{address.base} is in use by another program: the node will take a free one")
    advice = "choose another with --listen, such as /ip4/0.0.0.0/tcp/0"
    return Check("port", "fail", f"{address.base} cannot be listened on ({os.strerror(problem)}): {advice}")


def _bind(address: Address) -> int | None:
    family = socket.AF_INET6 if address.kind == "ip6" else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As the node's own listener has it: a port that was in use a moment ago is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((address.host, address.port))
            probe.listen(1)
    except OSError as error:
        return error.errno or errno.EINVAL
    return None


def _reach(config: Config, places: Sequence[Address]) -> Check:
    """Who can connect to this node, as far as its own addresses tell."""
    by_scope: dict[str, list[Address]] = {"public": [], "private": [], "loopback": []}
    for place in places:
        by_scope[scope_of(place)].append(place)
    if public := by_scope["public"]:
        return Check(
            "reach", "ok", f"from anywhere, if no firewall is before it and the address is right: {_listed(public)}"
        )
    if config.network.relay:
        return Check("reach", "ok", f"through the relay {config.network.relay[0]}, once it is connected to it")
    if private := by_scope["private"]:
        ports = ", ".join(sorted({str(place.port) for place in private if place.port}, key=int)) or "of the node"
        asked = "the router is asked for it (UPnP)" if config.network.upnp else "or turn [network] upnp on"
        return Check(
            "reach",
            "note",
            f"from the local network alone: {_listed(private)}. It can join others all the same. To be joined from"
            f" outside, forward TCP port {ports} of the router to this machine ({asked}) and put the public address"
            " into [network] announce, or name a node with a public address in [network] relay",
        )
    return Check(
        "reach",
        "note",
        "from this machine alone: it listens on loopback. Use --listen /ip4/0.0.0.0/tcp/4747 for others",
    )


def _mdns(places: Sequence[Address]) -> Check:
    try:
        importlib.import_module("zeroconf")
    except ImportError as error:
        return Check("mdns", "note", f"not possible ({error}): install swarmnode anew, or turn [network] mdns off")
    if any(scope_of(place) != "loopback" and not place.is_name for place in places):
        return Check("mdns", "ok", "nodes on the local network find each other, if it lets multicast through")
    return Check("mdns", "note", "finds nobody: this node listens on no address of a local network")


def _listed(places: Sequence[Address], most: int = 3) -> str:
    more = f" and {len(places) - most} more" if len(places) > most else ""
    return ", ".join(place.base if place.relay is None else str(place) for place in places[:most]) + more
