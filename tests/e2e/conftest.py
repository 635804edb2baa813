"""Fixtures for tests of whole nodes."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.nodes import SWARM, RunningNode, StartNode


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[StartNode]:
    """Starts nodes; whatever still runs at the end of the test is ended."""
    nodes: list[RunningNode] = []

    def start(
        *arguments: str,
        data_dir: Path | None = None,
        model: str = "tiny",
        env: dict[str, str] | None = None,
        silo: bool = True,
        namespace: str | None = None,
    ) -> RunningNode:
        directory = data_dir or tmp_path / "data"
        words = ("--silo", *arguments) if silo else (*SWARM, *arguments)
        before = ("ip", "netns", "exec", namespace) if namespace is not None else ()
        node = RunningNode(directory, words, tmp_path / f"{directory.name}.log", model, env or {}, before)
        nodes.append(node)
        return node

    yield start
    for node in nodes:
        if node.process.poll() is None:
            node.process.send_signal(signal.SIGCONT)
            node.kill()
