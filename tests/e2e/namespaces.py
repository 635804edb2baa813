"""Two networks on one machine with one cable between them, which can be cut."""

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Cable:
    """Names of two network namespaces and their addresses on the cable between them."""

    left: str
    right: str
    left_ip: str = "10.47.47.1"
    right_ip: str = "10.47.47.2"

    def cut(self) -> None:
        """Let nothing through, in silence: no connection is closed."""
        _ip("-n", self.right, "link", "set", "cable", "down")

    def heal(self) -> None:
        """Let everything through again."""
        _ip("-n", self.right, "link", "set", "cable", "up")


@contextmanager
def open_cable() -> Iterator[Cable]:
    """Make two namespaces, and take them away at the end. Skips the test without the right to do so."""
    if os.geteuid() != 0:
        pytest.skip("needs to be root to make network namespaces")
    word = uuid.uuid4().hex[:8]
    cable = Cable(f"swarm-{word}-left", f"swarm-{word}-right")
    made: list[str] = []
    try:
        for name in (cable.left, cable.right):
            if not _works("netns", "add", name):
                pytest.skip("this system does not let root make network namespaces")
            made.append(name)
        ends = ("name", "cable", "netns", cable.left, "type", "veth", "peer", "name", "cable", "netns", cable.right)
        if not _works("link", "add", *ends):
            pytest.skip("this system does not let root make a pair of virtual cards")
        for name, address in ((cable.left, cable.left_ip), (cable.right, cable.right_ip)):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for link in ("lo", "cable"):
                _ip("-n", name, "link", "set", link, "up")
        yield cable
    finally:
        for name in made:
            _works("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _works(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
