"""What is refused to a node without a model, and what it leaves alone."""

from pathlib import Path

import pytest

from node.config_sources import load, parse_flag
from node.daemon import run


def test_a_relay_has_no_rounds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ("node.relay=true", f"node.data_dir={tmp_path / 'data'}", "log.view=plain")
    config = load([parse_flag(flag) for flag in flags], environ={}).config
    assert run(config, 3) == 2
    assert "leave --rounds out" in capfd.readouterr().err
    assert not (tmp_path / "data").exists()
