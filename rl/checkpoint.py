"""Checkpoints on disk: a directory a round, complete or not there at all.

A checkpoint is written into a temporary directory, listed with sizes and SHA-256 in a manifest, forced to disk and only
then renamed into place, so a power cut or a full disk costs the one being written and no other. The newest whose files
match its manifest wins.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.errors import CheckpointError

log = logging.getLogger(__name__)

MANIFEST, STATE = "manifest.json", "state.json"
POLICY = "policy.json"
"""Of the learner's files the one that says which model was trained, and how."""
_ROUND = re.compile(r"\d{8}")
_TEMPORARY, _REPLACED = ".writing-", ".replaced-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are all as they were written. `state` is what the daemon stored with it."""

    round: int
    path: Path
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Damaged:
    """A checkpoint that cannot be used, and why."""

    path: Path
    reason: str


class CheckpointReader:
    """The checkpoints of a node that may be running: looked at, never changed. `damaged` are those passed over."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.damaged: list[Damaged] = []
        self._whole: dict[str, bool] = {}

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, or None. Those passed over are in `damaged`, and logged."""
        return self._first_whole(self._newest_first())

    def first(self, rounds: Iterable[int]) -> Checkpoint | None:
        """The first of these rounds that has a checkpoint which is whole, or None. As in `newest`."""
        return self._first_whole(self.directory / f"{number:08d}" for number in rounds)

    def _first_whole(self, paths: Iterable[Path]) -> Checkpoint | None:
        self.damaged = []
        for path in paths:
            try:
                return self._verify(path)
            except CheckpointError as error:
                if not path.exists():
                    continue  # its node has just pruned it
                self.damaged.append(Damaged(path, str(error)))
                log.warning("checkpoint %s is damaged (%s): falling back to another", path, error)
        return None

    @staticmethod
    def at(path: Path) -> Checkpoint:
        """The checkpoint that is this directory, wherever it is. Raises CheckpointError if it is not whole."""
        return _verified(path)

    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint, whole or not, oldest first."""
        return [int(path.name) for path in reversed(self._newest_first())]

    def _verify(self, path: Path) -> Checkpoint:
        """Read all of a checkpoint, and remember whether it is whole. Raises CheckpointError if it is not."""
        self._whole[path.name] = False
        checkpoint = _verified(path)
        self._whole[path.name] = True
        return checkpoint

    def _newest_first(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        rounds = [path for path in self.directory.iterdir() if _ROUND.fullmatch(path.name) and path.is_dir()]
        return sorted(rounds, key=lambda path: path.name, reverse=True)


class CheckpointStore(CheckpointReader):
    """The checkpoints of this node, which alone writes there."""

    def __init__(self, directory: Path, keep: int = 3) -> None:
        """Open (and make) `directory`, removing what a killed process left half done. Raises OSError, ValueError."""
        if keep < 1:
            raise ValueError("at least one checkpoint has to be kept")
        super().__init__(directory)
        self.keep = keep
        self.best: int | None = None
        """Round of a checkpoint that is kept beside the newest ones."""
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.iterdir():
            if left.name.startswith(_REPLACED):
                self._put_back(left)
            if left.name.startswith(_TEMPORARY):
                _delete(left)

    def _put_back(self, left: Path) -> None:
        """Finish a replacement that a kill cut in two: the old checkpoint returns if the new one did not arrive."""
        target = self.directory / left.name.removeprefix(_REPLACED)
        if target.exists() or left.is_symlink() or not left.is_dir():
            _delete(left)
        else:
            left.rename(target)

    def begin(self, round_number: int) -> Path:
        """A new directory to write the files of a checkpoint into, for `commit` or `discard`. Raises OSError."""
        temporary = self.directory / f"{_TEMPORARY}{round_number:08d}"
        self.discard(temporary)
        temporary.mkdir()
        return temporary

    def discard(self, directory: Path) -> None:
        """Remove what `begin` gave, and all that is in it. Raises OSError."""
        if directory.exists():
            _delete(directory)

    def commit(self, round_number: int, directory: Path, state: Mapping[str, Any]) -> None:
        """Make what is in `directory` the checkpoint of a round, and remove those that are too many.

        `state` (JSON values) is kept with it. A checkpoint of the same round is replaced. Takes seconds for a large
        model and may run in a thread, one call at a time. Raises OSError, TypeError or ValueError (of a state that is
        not JSON): then nothing of it stays, and all older ones do.
        """
        target = self.directory / f"{round_number:08d}"
        try:
            (directory / STATE).write_text(json.dumps({**state, "round": round_number}, indent=1), "utf-8")
            files = sorted(path for path in directory.rglob("*") if path.is_file())
            manifest = {path.relative_to(directory).as_posix(): _fingerprint(path) for path in files}
            (directory / MANIFEST).write_text(json.dumps({"files": manifest}, indent=1), "utf-8")
            _sync_tree(directory)
            self._move_into_place(directory, target)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._whole[target.name] = True
        self.prune()

    def _move_into_place(self, temporary: Path, target: Path) -> None:
        replaced = self.directory / f"{_REPLACED}{target.name}"
        if replaced.exists():
            self._put_back(replaced)
        if target.exists():
            target.rename(replaced)
        try:
            temporary.rename(target)
            _sync(self.directory)
        except BaseException:
            if not temporary.exists():
                target.rename(temporary)
            if replaced.exists():
                replaced.rename(target)
            raise
        _remove(replaced)

    def prune(self) -> None:
        """Remove all but the newest `keep` whole checkpoints, and the best one. Damaged ones newer than those stay.

        Each is read at most once in the life of this object; those it committed itself are taken to be whole.
        """
        good = 0
        for path in self._newest_first():
            if good >= self.keep and int(path.name) == self.best:
                continue
            if good >= self.keep:
                self._whole.pop(path.name, None)
                _remove(path)
            elif self._is_whole(path):
                good += 1

    def _is_whole(self, path: Path) -> bool:
        if path.name not in self._whole:
            try:
                self._verify(path)
            except CheckpointError as error:
                log.warning("checkpoint %s is damaged (%s): it does not count as one", path, error)
        return self._whole[path.name]


def _remove(path: Path) -> None:
    """Remove a checkpoint that is too many. If that fails, none is lost by it, and the next prune tries again."""
    try:
        if path.exists():
            _delete(path)
    except OSError as error:
        log.warning("the old checkpoint %s cannot be removed: %s", path, error)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _verified(path: Path) -> Checkpoint:
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))["files"]
        present = {found.relative_to(path).as_posix() for found in path.rglob("*") if not found.is_dir()} - {MANIFEST}
        if wrong := {STATE, *manifest} ^ present or {STATE} - manifest.keys():
            # A damaged manifest may name what no log can hold.
            raise CheckpointError(f"its files are not those of its manifest: {', '.join(map(ascii, sorted(wrong)))}")
        for name, expected in manifest.items():
            found = _fingerprint(path / name)
            if found["size"] != expected["size"]:
                raise CheckpointError(f"{name} has {found['size']} bytes, not {expected['size']}")
            if found != expected:
                raise CheckpointError(f"{name} is not what was written")
        state = json.loads((path / STATE).read_text("utf-8"))
        return Checkpoint(int(state["round"]), path, state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from error


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"sha256": digest, "size": file.tell()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(directory: Path) -> None:
    """Force every file, and then every directory that names one, to disk."""
    for path in sorted(directory.rglob("*"), reverse=True):
        _sync(path)
    _sync(directory)
