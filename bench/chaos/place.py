"""Where the nodes run: each in a network of its own with a disk of its own, or all on loopback.

The networks, mounts and names are made inside namespaces that belong to this process (see `enter`): they are gone with
the last process in them, however that ends, and nobody else on the machine sees them.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from bench.chaos.plan import WEIGHTS, Kind
from node.testnet.plan import free_ports

PORT = 4747
DISK_MB = 192
"""A node of the tiny model with a full pool and three checkpoints takes a third of it."""
SLOW = ("rate", "128kbit", "burst", "16kb", "latency", "1s")
"""A slow uplink: a batch of the tiny model takes a tenth of a second."""

_OUT, _SWITCHES = "/run/netns", ("together", "apart")
_WAYS = (("unshare", "--mount", "--net"), ("unshare", "--user", "--map-root-user", "--mount", "--net"))
_PROBE = (
    "mount -t tmpfs none /run && mkdir /run/netns && ip netns add probe && ip link add probe type bridge"
    " && ip link add port type veth peer name cable netns probe && tc qdisc add dev port root tbf " + " ".join(SLOW)
)


class Place(Protocol):
    """Nodes are numbered from 1. Only the faults in `kinds` may be done."""

    kinds: Collection[Kind]

    def data(self, node: int) -> Path:
        """The data directory."""

    def listen(self, node: int) -> str:
        """The address that the node listens on, and others dial."""

    def before(self, node: int) -> Sequence[str]:
        """Words in front of a node's command line."""

    def part(self, side: Collection[int]) -> None:
        """Let nothing through between these and the others, in silence; with nobody, let all through again."""

    def slow(self, node: int, on: bool) -> None:
        """Slow down what the node sends and receives."""

    def fill(self, node: int, on: bool) -> None:
        """Fill the node's disk; again and again, as it makes room. Or empty it."""

    def lock(self, node: int, on: bool) -> None:
        """Let nobody open a file of the node's data directory for writing, or make one. What is open stays so."""

    def close(self) -> None:
        """Take away what is not gone by itself. No node runs any more."""


def enter(arguments: Sequence[str]) -> None:
    """Start this program anew with `arguments` in namespaces of its own. Returns only where that is not possible."""
    for way in _WAYS:
        if _works([*way, "sh", "-c", _PROBE]):
            os.execvp(way[0], [*way, sys.executable, "-m", "bench.chaos", *arguments])


class Loopback:
    """Nodes on one machine and one disk: they can be killed and stopped, and their clocks be wrong."""

    kinds: Collection[Kind] = ("kill", "learner", "stop", "clock")

    def __init__(self, directory: Path, nodes: int) -> None:
        self._directory = directory
        self._ports = free_ports(nodes)
        for node in range(1, nodes + 1):
            self.data(node).mkdir(parents=True)

    def data(self, node: int) -> Path:
        """See `Place`."""
        return self._directory / f"node-{node}"

    def listen(self, node: int) -> str:
        """See `Place`."""
        return f"/ip4/127.0.0.1/tcp/{self._ports[node - 1]}"

    def before(self, node: int) -> Sequence[str]:
        """See `Place`."""
        return ()

    def part(self, side: Collection[int]) -> None:
        """Not possible here."""
        raise NotImplementedError

    def slow(self, node: int, on: bool) -> None:
        """Not possible here."""
        raise NotImplementedError

    def fill(self, node: int, on: bool) -> None:
        """Not possible here."""
        raise NotImplementedError

    def lock(self, node: int, on: bool) -> None:
        """Not possible here."""
        raise NotImplementedError

    def close(self) -> None:
        """There is nothing."""


class Spaces:
    """A network namespace and a small disk a node, and two switches of which one is only there to cut nodes off."""

    kinds: Collection[Kind] = tuple(WEIGHTS)

    def __init__(self, directory: Path, nodes: int) -> None:
        """To be made by a process that `enter` started. Raises CalledProcessError."""
        self._directory = directory
        self._nodes = range(1, nodes + 1)
        _run("mount", "-t", "tmpfs", "none", "/run")
        Path(_OUT).mkdir()
        for switch in _SWITCHES:
            _run("ip", "link", "add", switch, "type", "bridge")
            _run("ip", "link", "set", switch, "up")
        for node in self._nodes:
            self._connect(node)
            self.data(node).mkdir(parents=True)
            _run("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", str(self.data(node)))

    def _connect(self, node: int) -> None:
        name, port = _name(node), _port(node)
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", "cable", "netns", name)
        _run("ip", "link", "set", port, "master", _SWITCHES[0], "up")
        _run("ip", "-n", name, "addr", "add", f"{_ip(node)}/16", "dev", "cable")
        for link in ("lo", "cable"):
            _run("ip", "-n", name, "link", "set", link, "up")

    def data(self, node: int) -> Path:
        """See `Place`."""
        return self._directory / f"node-{node}"

    def listen(self, node: int) -> str:
        """See `Place`."""
        return f"/ip4/{_ip(node)}/tcp/{PORT}"

    def before(self, node: int) -> Sequence[str]:
        """See `Place`."""
        # `ip netns exec` would give the node mounts of its own, and it would not see what happens to its disk.
        return ("nsenter", f"--net={_OUT}/{_name(node)}")

    def part(self, side: Collection[int]) -> None:
        """See `Place`."""
        for node in self._nodes:
            _run("ip", "link", "set", _port(node), "master", _SWITCHES[node in side])

    def slow(self, node: int, on: bool) -> None:
        """See `Place`."""
        for words in (("dev", _port(node)), ("dev", "cable")):
            tc = ("tc",) if words[1] != "cable" else ("tc", "-n", _name(node))
            if on:
                _run(*tc, "qdisc", "add", *words, "root", "tbf", *SLOW)
            else:
                _run(*tc, "qdisc", "del", *words, "root")

    def fill(self, node: int, on: bool) -> None:
        """See `Place`."""
        ballast = self.data(node) / "ballast"
        if not on:
            ballast.unlink(missing_ok=True)
            return
        with ballast.open("ab", buffering=0) as file:
            while free := shutil.disk_usage(self.data(node)).free:
                try:
                    file.write(bytes(min(free, 2**20)))
                except OSError:
                    return  # the node was quicker, or something smaller than a page is left

    def lock(self, node: int, on: bool) -> None:
        """See `Place`."""
        path = str(self.data(node))
        if on:
            # The disk itself cannot be made read-only while files are open. A second, read-only view of it over the
            # first is what every path leads to from now on.
            _run("mount", "--bind", path, path)
            _run("mount", "-o", "remount,bind,ro", path)
        else:
            _run("umount", "--lazy", path)

    def close(self) -> None:
        """See `Place`."""
        for node in self._nodes:
            _run("umount", "--lazy", str(self.data(node)))


def _name(node: int) -> str:
    return f"node{node}"


def _port(node: int) -> str:
    return f"port{node}"


def _ip(node: int) -> str:
    return f"10.47.0.{node}"


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


def _works(words: Sequence[str]) -> bool:
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
