"""A node of the tiny model does without vLLM, where that is installed too: its import alone takes ten seconds."""

import os
from pathlib import Path

import pytest

from tests.e2e.nodes import QUICK, StartNode


@pytest.mark.slow
def test_a_tiny_node_never_imports_vllm(start_node: StartNode, tmp_path: Path) -> None:
    trap = tmp_path / "modules" / "vllm" / "__init__.py"
    trap.parent.mkdir(parents=True)
    trap.write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\nraise ImportError('vllm was imported')\n")
    path = os.pathsep.join((str(tmp_path / "modules"), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    node = start_node("--rounds", "2", *QUICK, env={"PYTHONPATH": path})
    assert node.wait() == 0, node.log()
    assert "engine=transformers" in node.log()
    assert not (tmp_path / "imported").exists()
