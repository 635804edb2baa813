"""Fixtures for tests of whole nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.nodes import RunningNode, StartNode


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[StartNode]:
    """Starts nodes; whatever still runs at the end of the test is ended."""
    nodes: list[RunningNode] = []

    def start(
        *arguments: str, data_dir: Path | None = None, model: str = "tiny", env: dict[str, str] | None = None
    ) -> RunningNode:
        directory = data_dir or tmp_path / "data"
        node = RunningNode(directory, arguments, tmp_path / f"{directory.name}.log", model, env or {})
        nodes.append(node)
        return node

    yield start
    for node in nodes:
        if node.process.poll() is None:
            node.kill()
