"""A node seen from outside, by the files that it writes: its record, `swarm.json` and its log."""

import os
import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from node.datadir import DataDir
from node.record import Record

MEAN = 50
"""Rounds that the means of first and last rounds take in."""

_PIECE = 2**16
"""Bytes of a log that are looked at in one go; a node that says more is not followed line by line."""

_LINE = re.compile(r"^(?:\d\d:\d\d:\d\d )?\[(debug|info|warning|error|critical)\s*\] (.*)$")


@dataclass(frozen=True, slots=True)
class Step:
    """What is kept of a round's record."""

    round: int
    reward: float
    local: int
    external: int
    peers: int
    sent: int
    received: int


class Progress:
    """A node's `metrics.jsonl`, followed as it grows."""

    def __init__(self, data_dir: Path) -> None:
        self._path = DataDir(data_dir).metrics_path
        self._offset = 0
        self.steps: list[Step] = []
        self.rejected: Counter[str] = Counter()

    @property
    def round(self) -> int:
        """The last finished round; 0 before the first."""
        return self.steps[-1].round if self.steps else 0

    def read(self) -> None:
        """Take in what is new. A node that starts again takes back rounds; then all is read anew."""
        if not self._take(self._new()):
            self._offset = 0
            self.steps.clear()
            self.rejected.clear()
            self._take(self._new())

    def _new(self) -> bytes | None:
        """What stands behind the part that has been read; None if that part is not there any more."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    return None
                file.seek(self._offset)
                return file.read()
        except FileNotFoundError:
            return None if self._offset else b""

    def _take(self, data: bytes | None) -> bool:
        """Add the whole lines in `data`; False if they do not go on where the last ones ended."""
        if data is None:
            return False
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                record = Record.model_validate_json(line)
            except ValidationError:
                return False
            if record.round <= self.round:
                return False
            self._offset += len(line)
            self.rejected.update(record.rejected)
            self.steps.append(_step(record))
        return True


def _step(record: Record) -> Step:
    return Step(
        round=record.round,
        reward=record.reward_local,
        local=record.local_groups,
        external=record.external_groups,
        peers=record.peers,
        sent=record.batches_sent,
        received=record.batches_received,
    )


def mean_reward(steps: Sequence[Step]) -> float | None:
    """None without rounds."""
    return sum(step.reward for step in steps) / len(steps) if steps else None


class LogTail:
    """A node's log file, followed as it grows from where it ended at first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._level = "info"
        self.last: deque[str] = deque(maxlen=40)

    def read(self) -> list[tuple[str, str]]:
        """New whole lines as level and text, without time and without those that only say that a round is done."""
        try:
            size = self._path.stat().st_size
            self._offset = max(self._offset, size - _PIECE)
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_PIECE)
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = []
        for line in whole.decode(errors="replace").splitlines():
            self.last.append(line)
            match = _LINE.match(line)
            if match is not None:
                self._level = match[1]
            text = match[2] if match is not None else line
            if text.strip() and not text.startswith("round "):
                lines.append((self._level, text))
        return lines
