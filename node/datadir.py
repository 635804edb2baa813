"""The data directory: where everything is that a node must not lose, and the lock that keeps it to one node."""

import errno
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from node.config import Config
from node.config_text import dump_toml
from node.errors import NodeError
from p2p.files import replace_file, sweep

_LOCK_TRIES = 5
_LOCK_PAUSE = 0.05
"""Seconds between tries. `DataDir.running` holds the lock for a moment when it looks; that must not refuse a node."""

_CONFIG_COMMENT = """\
# The configuration in force, written anew at every `swarmnode start`, which takes nothing from it but the model's name
# where none is given: change your own file or flags instead. `swarmnode eval`, `chat`, `export` and `status` read it.

"""


class DataDirError(NodeError):
    """The data directory cannot be used. The message says what to do."""


class DataDir:
    """Paths below one directory. `open` also takes the lock; `look` leaves a running node alone."""

    def __init__(self, path: Path, lock: int | None = None) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> "DataDir":
        """Create the directory if need be and make it this process's own until `close`.

        Raises DataDirError if another node has it, or it cannot be written.
        """
        path = path.expanduser().absolute()
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DataDirError(_explain(path, error)) from error
        try:
            _take(lock, path)
            os.truncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            cls(path)._sweep()
        except OSError as error:
            os.close(lock)
            raise DataDirError(_explain(path, error)) from error
        except DataDirError:
            os.close(lock)
            raise
        return cls(path, lock)

    def _sweep(self) -> None:
        """A node that is killed while it writes, again and again, does not fill its disk."""
        # Not `evaluation_path`: that is written beside a running node.
        for path in (
            self.identity_path,
            self.config_path,
            self.peers_path,
            self.reputation_path,
            self.contribution_path,
        ):
            sweep(path)

    @classmethod
    def look(cls, path: Path) -> "DataDir":
        """The directory of a node that may be running, to read from. Raises DataDirError if there is none."""
        path = path.expanduser().absolute()
        data = cls(path)
        if not path.is_dir():
            raise data.never_used()
        return data

    @property
    def holds_run(self) -> bool:
        """Whether a node has ever got as far as having something to go on from."""
        return self.config_path.is_file() or self.checkpoints_path.is_dir()

    def never_used(self) -> DataDirError:
        """What to tell whoever looks for a run where none is."""
        return DataDirError(f"no node has run in {self.path}: start one with `swarmnode start --data-dir {self.path}`")

    def __enter__(self) -> "DataDir":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the directory back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def identity_path(self) -> Path:
        """The node's private key."""
        return self.path / "identity.key"

    @property
    def pool_path(self) -> Path:
        """The pool of scored groups (SQLite)."""
        return self.path / "pool.sqlite"

    @property
    def checkpoints_path(self) -> Path:
        """One directory a checkpoint, named by its round."""
        return self.path / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        """One line a round (`node.record`)."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations_path(self) -> Path:
        """One line an evaluation while training (`node.evaluations`)."""
        return self.path / "evaluations.jsonl"

    @property
    def evaluation_path(self) -> Path:
        """The last result of `swarmnode eval`."""
        return self.path / "evaluation.json"

    @property
    def config_path(self) -> Path:
        """The configuration of the last run, complete."""
        return self.path / "config.toml"

    @property
    def swarm_path(self) -> Path:
        """What the running node says of its swarm (`node.snapshot`)."""
        return self.path / "swarm.json"

    @property
    def peers_path(self) -> Path:
        """Nodes met before (`p2p.peerbook`)."""
        return self.path / "peers.json"

    @property
    def reputation_path(self) -> Path:
        """What other nodes have done (`p2p.reputation`)."""
        return self.path / "reputation.json"

    @property
    def contribution_path(self) -> Path:
        """What became of this node's groups, as others say (`p2p.contribution`)."""
        return self.path / "contribution.json"

    def write_config(self, config: Config) -> None:
        """Keep `config` as run, for `swarmnode eval` and its like. Readable by its owner alone: it may hold secrets.

        Raises OSError if the disk is full or fails.
        """
        write_atomically(self.config_path, (_CONFIG_COMMENT + dump_toml(config)).encode(), mode=0o600)

    def running(self) -> int | None:
        """Process id of the node that holds the directory; None if there is none. Raises DataDirError."""
        try:
            lock = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataDirError(_explain(self.path, error)) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holder(lock)
        finally:
            os.close(lock)
        return None


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` by `data`, so that a crash at any moment leaves the old file or the new one.

    Raises OSError, always with `path` as its file name.
    """
    try:
        replace_file(path, data, mode)
        sync_directory(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_directory(path: Path) -> None:
    """Make renames inside `path` last. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take(lock: int, path: Path) -> None:
    for left in reversed(range(_LOCK_TRIES)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if left == 0:
                who = _holder(lock)
                raise DataDirError(
                    f"{path} is in use by the node with process id {who or '(unknown)'}. Stop that one, or give this"
                    " one another directory with --data-dir"
                ) from error
            time.sleep(_LOCK_PAUSE)
        else:
            return


def _holder(lock: int) -> int:
    """The process id in the lock file; 0 if its holder has not written it yet."""
    text = os.pread(lock, 32, 0).strip()
    return int(text) if text.isdigit() else 0


def _explain(path: Path, error: OSError) -> str:
    remedies = {
        errno.EACCES: "is not writable by this user: change its owner, or choose another with --data-dir",
        errno.EPERM: "is not writable by this user: change its owner, or choose another with --data-dir",
        errno.EROFS: "is on a read-only file system: choose another with --data-dir",
        errno.EEXIST: "is not a directory: choose another with --data-dir",
        errno.ENOTDIR: "is not a directory: choose another with --data-dir",
        errno.ENOSPC: "is on a full disk: make room, or choose another with --data-dir",
        errno.ENOLCK: "is on a file system without locks: choose a local one with --data-dir",
    }
    return f"data directory {path} {remedies.get(error.errno or 0, f'cannot be used: {error.strerror or error}')}"
