"""How much of the machine this process may use: cores and memory, the limits of a container counted in.

What the system tells of itself is the whole machine, also in a container that may use a part of it. The part is set by
control groups of Linux, of version 2 or of version 1 with its own hierarchy for each kind of limit
(docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1). A limit that cannot be read is none.
"""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that this process and its neighbours in the same container may have, and what is left of them."""

    total: int
    available: int


def memory(root: Path = _ROOT) -> Memory:
    """The machine's memory, or the part of it that the control groups leave. `root` is where `proc` and `sys` lie."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for directory, version in _groups(root, "memory"):
        with suppress(OSError, ValueError):
            limit, used = _memory_of(directory, version)
            total, available = min(total, limit), min(available, limit - used)
    return Memory(total, max(0, available))


def cpus(root: Path = _ROOT) -> int:
    """The cores that this process may keep busy at once, at least 1: a share of a core counts as one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for directory, version in _groups(root, "cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):
            count = min(count, math.ceil(_cpus_of(directory, version)))
    return max(1, count)


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The directory of each control group that this process is in, innermost first, and the version of its files."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            top, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        # In a container the path may be that of the host, where `top` is already the container's own group.
        inner = top / path.lstrip("/")
        yield from ((group, version) for group in (inner, *inner.parents) if group == top or top in group.parents)


def _memory_of(directory: Path, version: int) -> tuple[int, int]:
    """Limit and use in bytes. Cached files that nobody reads are no use: they go when somebody needs the room.

    Raises OSError, or ValueError where there is no limit.
    """
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    limit, used = (int((directory / name).read_text()) for name in names)
    key = "inactive_file" if version == 2 else "total_inactive_file"
    stat = dict(line.split(" ", 1) for line in (directory / "memory.stat").read_text().splitlines())
    return limit, used - int(stat.get(key, 0))


def _cpus_of(directory: Path, version: int) -> float:
    """Cores. Raises OSError, or ValueError where there is no limit."""
    if version == 2:
        quota, period = (directory / "cpu.max").read_text().split()
    else:
        quota, period = ((directory / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    if int(quota) < 0:
        raise ValueError("no limit")
    return int(quota) / int(period)
