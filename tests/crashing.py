"""A process that dies between any two of its file operations, for tests of what has to survive that.

It stands in for SIGKILL inside one test: from the fatal operation on, every further one fails too, so that nothing that
tidies up on the way out can touch the disk. It sees what goes through `os` and `open`, not what C libraries write.
"""

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_CHANGES = ("fsync", "mkdir", "remove", "rename", "replace", "rmdir", "truncate", "unlink")
_TAKES_ROOM = ("mkdir", "open", "write")


class Crash(BaseException):
    """The process is dead. No `except Exception` sees it."""


class Disk:
    """Counts operations. The one after `lives` others kills, and all that follow it fail; None lives for ever.

    `full`: the number of operations after which one that needs room finds none, once.
    """

    def __init__(self, lives: int | None, full: int | None = None) -> None:
        self.lives, self.full = lives, full
        self.dead = False
        self.done = 0
        self._unsynced: set[int] = set()

    def step(self, what: str) -> None:
        """Called before each operation."""
        if self.dead or (self.lives is not None and self.done >= self.lives):
            self.dead = True
            raise Crash
        self.done += 1
        if self.full is not None and self.done > self.full and what in _TAKES_ROOM:
            self.full = None
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def wrote(self, descriptor: int) -> None:
        """A file has content that was not forced to disk."""
        self._unsynced.add(os.fstat(descriptor).st_ino)

    def synced(self, descriptor: int) -> None:
        """A file is on disk."""
        self._unsynced.discard(os.fstat(descriptor).st_ino)

    def lose_power(self, root: Path) -> None:
        """What the machine itself loses when it goes too: the content of files that were not forced to disk."""
        for path in root.rglob("*"):
            if path.is_file() and path.stat().st_ino in self._unsynced:
                os.truncate(path, path.stat().st_size // 2)


@contextmanager
def crashing(lives: int | None, full: int | None = None) -> Iterator[Disk]:
    """Run the block on such a disk. Its death, or a full disk, comes out of the block as `Crash` or OSError."""
    disk = Disk(lives, full)
    with pytest.MonkeyPatch.context() as patch:
        for name in _CHANGES:
            patch.setattr(os, name, _counted(disk, name, getattr(os, name)))
        patch.setattr(os, "open", _opening(disk, os.open))
        patch.setattr(io, "open", _files(disk, io.open))
        yield disk


def _counted(disk: Disk, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        disk.step(name)
        result = real(*args, **kwargs)
        if name == "fsync":
            disk.synced(args[0])
        return result

    return call


def _opening(disk: Disk, real: Callable[..., int]) -> Callable[..., int]:
    def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_CREAT | os.O_TRUNC):
            disk.step("open")
        return real(path, flags, *args, **kwargs)

    return call


def _files(disk: Disk, real: Callable[..., Any]) -> Callable[..., Any]:
    class Raw(io.FileIO):
        def write(self, data: Any, /) -> int:
            was_dead = disk.dead
            try:
                disk.step("write")
            except Crash:
                if not was_dead:
                    # It died in the middle of it.
                    super().write(bytes(data)[: len(data) // 2])
                    disk.wrote(self.fileno())
                raise
            disk.wrote(self.fileno())
            return super().write(data) or 0

        def truncate(self, size: int | None = None, /) -> int:
            disk.step("truncate")
            return super().truncate(size)

    def call(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax+"):
            return real(file, mode, buffering, encoding, *args, **kwargs)
        if not isinstance(file, int):
            disk.step("open")
        raw = Raw(file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, *args, **kwargs)

    return call
