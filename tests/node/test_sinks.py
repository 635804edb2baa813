"""Copies of the record for other tools."""

import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from node.config import SinkSettings
from node.sinks import SinkError, open_sinks
from tests.node.records import record

ROOT = Path(__file__).parents[2]


def points(directory: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard itself shows for a tag."""
    accumulator = EventAccumulator(str(directory / "tensorboard"))
    accumulator.Reload()
    return [(event.step, round(event.value, 4)) for event in accumulator.Scalars(tag)]


def test_tensorboard_shows_every_round_and_kind(tmp_path: Path) -> None:
    with open_sinks(SinkSettings(tensorboard=True), tmp_path) as sinks:
        for number in (1, 2, 3):
            for sink in sinks:
                sink.write(record(number, reward_local=number / 4, rejected={"stale": number}), {"gcd": number / 8})
    assert points(tmp_path, "round/reward_local") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert points(tmp_path, "reward/gcd") == [(1, 0.125), (2, 0.25), (3, 0.375)]
    assert points(tmp_path, "rejected/stale") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    with pytest.raises(KeyError):
        points(tmp_path, "round/reward_external")


def test_tensorboard_forgets_rounds_that_are_done_again(tmp_path: Path) -> None:
    with open_sinks(SinkSettings(tensorboard=True), tmp_path) as (sink,):
        for number in (1, 2, 3):
            sink.write(record(number, reward_local=0.25), {})
        sink.write(record(2, reward_local=0.5), {})
    assert points(tmp_path, "round/reward_local") == [(1, 0.25), (2, 0.5)]
    # The same after a restart, which opens another event file.
    with open_sinks(SinkSettings(tensorboard=True), tmp_path) as (sink,):
        sink.write(record(2, reward_local=0.75), {})
    assert points(tmp_path, "round/reward_local") == [(1, 0.25), (2, 0.75)]


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_missing_package_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    if name == "tensorboard":
        monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(SinkError) as caught, open_sinks(SinkSettings.model_validate({name: True}), tmp_path):
        pass
    assert f"pip install -e '.[{name}]'" in str(caught.value)


def test_nothing_heavy_enters_the_node_process() -> None:
    script = (
        "import sys, tempfile, pathlib, node.daemon, node.cli\n"
        "from node.config import SinkSettings\n"
        "from node.sinks import open_sinks\n"
        "with open_sinks(SinkSettings(tensorboard=True), pathlib.Path(tempfile.mkdtemp())): pass\n"
        "print([name for name in ('torch', 'transformers', 'reasoning_gym', 'tensorflow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_a_sink_that_fails_ends_itself_and_not_the_node(tmp_path: Path) -> None:
    # A limit on the size of files fails its writes, as a full disk does.
    script = """
import resource, sys
from pathlib import Path
from node import logs
from node.config import LogSettings, SinkSettings
from node.sinks import open_sinks
from tests.node.records import record
logs.configure(LogSettings())
with open_sinks(SinkSettings(tensorboard=True), Path(sys.argv[1])) as (sink,):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
    for number in range(1, 50):
        sink.write(record(number), {})
print("went on")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "went on\n"
    assert done.stderr.count("gets no more metrics") == 1
