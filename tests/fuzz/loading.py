"""The fuzz targets: one module each in `targets`, for what reads bytes from outside.

A target has `seeds() -> list[bytes]`, good inputs made by what writes them in earnest, and `run(data: bytes) -> None`,
which reads `data` as the node does and lets nothing pass but the error that the reader's documentation names. It may
have `LONGEST`, the bytes of the longest input to try.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LONGEST = 4096


@dataclass(frozen=True)
class Target:
    """One thing that reads bytes. `seeds` are read anew at each call."""

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    longest: int


def names() -> list[str]:
    """All targets, by name."""
    return sorted(path.stem for path in (Path(__file__).parent / "targets").glob("*.py"))


def load(name: str) -> Target:
    """Import a target."""
    module = importlib.import_module(f"tests.fuzz.targets.{name}")
    return Target(name, module.run, module.seeds, getattr(module, "LONGEST", LONGEST))
