"""A full disk pauses a node; it does not end it and it corrupts nothing."""

import errno
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import trio

from node.errors import NodeError
from node.stop import Stop

RETRY_SECONDS = 5.0
"""How long to wait before looking again: somebody has to make room first."""

_MB = 2**20

T = TypeVar("T")


class DiskFullError(NodeError):
    """The node was told to stop while something waited for room on the disk."""


def is_disk_full(error: BaseException) -> bool:
    """Whether an error of a write says that there was no room left."""
    if isinstance(error, OSError):
        return error.errno in {errno.ENOSPC, errno.EDQUOT}
    if isinstance(error, sqlite3.OperationalError):
        return error.sqlite_errorcode == sqlite3.SQLITE_FULL
    return False


class Disk:
    """Guards writes below `path`. `say(level, text)` tells the operator, once a pause."""

    def __init__(self, path: Path, min_free_mb: int, stop: Stop, say: Callable[[str, str], None]) -> None:
        self._path = path
        self._min_free_mb = min_free_mb
        self._stop = stop
        self._say = say

    async def wait_for_room(self) -> None:
        """Return when at least `min_free_mb` are free, or when told to stop."""
        if self._free_mb() >= self._min_free_mb:
            return
        self._say(
            "error",
            f"training pauses: {self._free_mb()} MB are free below {self._path}, [storage] min_free_mb asks for"
            f" {self._min_free_mb}. Make room there and it goes on by itself",
        )
        while self._free_mb() < self._min_free_mb:
            await self._wait()
            if self._stop.requested:
                return
        self._say("info", "there is room on the disk again: training goes on")

    async def write(self, what: str, action: Callable[[], Awaitable[T]]) -> T:
        """`await action()`, again and again while the disk is full. Each try must leave things whole.

        Raises DiskFullError if told to stop while it waits, and any other error of the action.
        """
        paused = False
        while True:
            try:
                result = await action()
            except (OSError, sqlite3.OperationalError) as error:
                if not is_disk_full(error):
                    raise
                if not paused:
                    self._say(
                        "error",
                        f"training pauses: the disk below {self._path} is full, {what} could not be written ({error})."
                        " Make room there and it goes on by itself",
                    )
                paused = True
            else:
                if paused:
                    self._say("info", f"there is room on the disk again: {what} is written, training goes on")
                return result
            await self._wait()
            if self._stop.requested:
                raise DiskFullError(
                    f"stopped while the disk below {self._path} was full: {what} is not written, and the next start"
                    " does the rounds after the last checkpoint again"
                )

    def _free_mb(self) -> int:
        return shutil.disk_usage(self._path).free // _MB

    async def _wait(self) -> None:
        with self._stop.interruptible():
            await trio.sleep(RETRY_SECONDS)
