"""What the node takes of its machine, looked at when somebody asks, and not more often than every two seconds."""

import os
import shutil
import time
from pathlib import Path
from typing import Literal

import psutil
import trio

from node.api.models import Process, Resources
from rl import machine

SECONDS = 2.0

_NAMES: dict[str, Literal["learner", "sandbox"]] = {
    "rl.learner_child": "learner",
    "rl.rank_child": "learner",
    "verifiers.worker": "sandbox",
}


class Meter:
    """Reads memory, disk and processor time."""

    def __init__(self, directory: Path, limiter: trio.CapacityLimiter) -> None:
        self._directory = directory
        self._limiter = limiter
        self._lock = trio.Lock()
        self._last: Resources | None = None
        self._known: dict[int, psutil.Process] = {}

    async def read(self) -> Resources:
        """What was read last, if that is new enough."""
        async with self._lock:
            if self._last is None or time.time() - self._last.time >= SECONDS:
                self._last = await trio.to_thread.run_sync(self._read, limiter=self._limiter)
            return self._last

    def _read(self) -> Resources:
        memory, disk = machine.memory(), shutil.disk_usage(self._directory)
        own = psutil.Process(os.getpid())
        found = {process.pid: process for process in (own, *own.children(recursive=True))}
        # Kept from one look to the next: processor time is the difference between two.
        self._known = {pid: self._known.get(pid, process) for pid, process in found.items()}
        processes = [entry for process in self._known.values() if (entry := _entry(process)) is not None]
        return Resources(
            time=time.time(),
            cpus=psutil.cpu_count() or 1,
            cpu_percent=psutil.cpu_percent(),
            memory_total=memory.total,
            memory_available=memory.available,
            disk_total=disk.total,
            disk_free=disk.free,
            processes=processes,
        )


def _entry(process: psutil.Process) -> Process | None:
    """None for a process that has just ended."""
    try:
        with process.oneshot():
            words = process.cmdline()
            name = next((_NAMES[word] for word in words if word in _NAMES), None)
            return Process(
                name="node" if process.pid == os.getpid() else name or "other",
                pid=process.pid,
                memory=process.memory_info().rss,
                cpu_percent=process.cpu_percent(),
            )
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return None
