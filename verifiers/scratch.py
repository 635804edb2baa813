"""Directories for as long as a process lives, and the removal of those whose process could not do it itself.

A killed node leaves its directory behind. Each living one holds a lock on its own, which the system lets go of however
the process ends, so the next node can tell. A process id in the name would not do: containers that share the directory
for temporary files number their processes alike.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "swarmnode-sandbox-"


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A new directory that only this user can enter, removed with all it holds when the block is left.

    Removes those of dead processes of this user first. Raises OSError if no directory can be made.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with _locked(left) as stale:
            if stale:
                shutil.rmtree(left)
    # A process that starts at the same time may take a directory without a lock for a dead one's, and remove it.
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with _locked(path) as ours:
            if not ours:
                continue
            try:
                yield path
            finally:
                shutil.rmtree(path)
            return


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds the lock of a directory; False if it is gone, somebody else's, or locked by a process that lives."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        yield os.fstat(number).st_uid == os.getuid() and _lock(number) and path.exists()
    finally:
        os.close(number)


def _lock(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
