"""Where adapters lie on their way to the engine: a fresh directory each time, in memory where the machine allows it.

vLLM remembers an adapter by its name, number and path, never by its content, and one that is missing kills it. So no
name, number or path is used twice, and the files are checked before they are used.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from rl.errors import EngineError
from rl.weights import ADAPTER_FILE

PREFIX = "swarmnode-engine-"
SHARED_MEMORY = Path("/dev/shm")


class HandOver:
    """Private directories for one engine, one at a time."""

    def __init__(self, parent: Path | None = None, need: int = 0) -> None:
        """`parent` is where they lie; shared memory if `need` bytes fit there twice, otherwise the system's temporary
        directory.
        """
        self._parent = parent or (SHARED_MEMORY if _has_room(SHARED_MEMORY, need) else Path(tempfile.gettempdir()))
        remove_stale(self._parent)
        self._root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=self._parent))
        self._number = 0

    def fresh(self) -> tuple[int, Path]:
        """A number and an empty directory that were never used before; those before it are removed."""
        self.clear()
        self._number += 1
        directory = self._root / f"weights-{self._number}"
        directory.mkdir()
        return self._number, directory

    def clear(self) -> None:
        """Remove what has been handed over: whole models in memory are not kept longer than needed."""
        for path in self._root.iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove everything. May be called twice, and by another thread than the one that hands over: that one finds no
        place to write to any more.
        """
        gone = self._root.with_name(f"{self._root.name}-gone")
        with contextlib.suppress(FileNotFoundError):
            self._root.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _has_room(directory: Path, need: int) -> bool:
    # A container often has 64 MiB of shared memory.
    return os.access(directory, os.W_OK) and shutil.disk_usage(directory).free > 2 * need


def check_adapter(directory: Path) -> None:
    """Raise EngineError if an adapter's files are not there."""
    for name in (ADAPTER_FILE, "adapter_config.json"):
        path = directory / name
        if not path.is_file() or path.stat().st_size == 0:
            raise EngineError(f"the adapter for the engine is missing: {path}")


def remove_stale(parent: Path) -> None:
    """Remove what engines of processes that are gone have left in `parent`."""
    for path in parent.glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if owner.isdecimal() and path.stat().st_uid == os.getuid() and not _alive(int(owner)):
                shutil.rmtree(path)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
