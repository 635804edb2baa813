"""The container images: who gets which directory of a shared volume, and whether compose can read its files."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[1] / "docker"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts containers' entry points with one volume. Their node says where its data lies, and runs on."""
    if shutil.which("flock") is None:
        pytest.skip("flock is not installed")
    programs, volume = tmp_path / "bin", tmp_path / "volume"
    programs.mkdir()
    volume.mkdir()
    node = programs / "swarmnode"
    node.write_text('#!/bin/sh\necho "$*: $(readlink "$SWARMNODE_NODE__DATA_DIR")"\nread -r _\n')
    node.chmod(0o755)
    with ExitStack() as stack:

        def begin(container: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
            process = subprocess.Popen(
                [DOCKER / "entrypoint.sh", *(arguments or ("start", "--no-tty"))],
                env={
                    "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
                    "SWARMNODE_VOLUME": str(volume),
                    "SWARMNODE_NODE__DATA_DIR": str(tmp_path / container),
                    **environment,
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield begin


def place(process: "subprocess.Popen[str]") -> str:
    """The name of the directory that a node has got."""
    assert process.stdout is not None
    assert process.stdout.readline().startswith("this node is number")
    command, _, path = process.stdout.readline().partition(": ")
    assert command == "start --no-tty"
    return Path(path.strip()).name


def test_each_replica_has_a_directory_of_its_own_and_the_next_takes_the_one_that_is_free(start: Start) -> None:
    nodes = [start(f"container-{number}") for number in range(3)]
    places = [place(node) for node in nodes]
    assert sorted(places) == ["1", "2", "3"]
    nodes[1].kill()
    nodes[1].wait()
    assert place(start("container-3")) == places[1]
    assert place(start("container-4")) == "4"


def test_the_next_swarm_has_the_directories_of_the_last(start: Start, tmp_path: Path) -> None:
    for life in range(2):
        nodes = [start(f"container-{life}-{number}") for number in range(2)]
        assert sorted(map(place, nodes)) == ["1", "2"]
        for node in nodes:
            node.kill()
            node.wait()
    assert sorted(path.name for path in (tmp_path / "volume").iterdir()) == ["1", "2"]


def test_other_commands_take_no_directory(start: Start, tmp_path: Path) -> None:
    said, _ = start("container", "doctor", "--json").communicate("\n", timeout=60)
    assert said == "doctor --json: \n"
    assert not list((tmp_path / "volume").iterdir())


def test_a_data_directory_of_its_own_is_left_as_it_is(start: Start, tmp_path: Path) -> None:
    volume, elsewhere = tmp_path / "volume", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for chosen in (volume / "mine", elsewhere):
        said, _ = start("-", SWARMNODE_NODE__DATA_DIR=str(chosen)).communicate("\n", timeout=60)
        assert said == "start --no-tty: \n"
    assert not list(volume.iterdir())
    assert not list(elsewhere.iterdir())


def test_a_volume_that_is_not_there_is_told(start: Start, tmp_path: Path) -> None:
    node = start("container", SWARMNODE_VOLUME=str(tmp_path / "nowhere"))
    said, told = node.communicate(timeout=60)
    assert node.returncode == 1
    assert said == ""
    assert told.startswith(f"error: {tmp_path / 'nowhere'} cannot be written by user {os.getuid()}: mount a volume")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("whose", ["", "1"])
def test_a_directory_of_another_user_is_told(start: Start, tmp_path: Path, whose: str) -> None:
    directory = tmp_path / "volume" / whose
    directory.mkdir(exist_ok=True)
    directory.chmod(0o500)
    node = start("container")
    said, told = node.communicate(timeout=60)
    directory.chmod(0o700)
    assert node.returncode == 1
    assert said == ""
    assert told.startswith(f"error: {directory} ")
    assert f"user {os.getuid()}" in told


@pytest.mark.parametrize("more", [None, "compose.gpu.yaml", "compose.silo.yaml"])
def test_compose_can_read_its_files(more: str | None) -> None:
    compose = next(filter(works, (["docker", "compose"], ["docker-compose"])), None)
    if compose is None:
        pytest.skip("docker compose is not installed")
    flags = [word for file in ("compose.yaml", more) if file for word in ("--file", file)]
    done = subprocess.run(
        [*compose, *flags, "config", "--quiet"], cwd=DOCKER, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def works(compose: list[str]) -> bool:
    """Whether this is a command here; `docker` alone may lack the plugin."""
    if shutil.which(compose[0]) is None:
        return False
    return subprocess.run([*compose, "version"], capture_output=True, timeout=60, check=False).returncode == 0
