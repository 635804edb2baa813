"""The newest rounds, as JSON in memory: whoever asks for them costs the node no reading and no parsing."""

import json
import sqlite3
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path

from node.record import MetricsFile, Record

MAX_ROUNDS = 10_000
"""Rounds kept; about a kilobyte each. Older ones are in `metrics.jsonl`."""

RECENT = 50
"""Rounds that the mean reward looks back."""


class History:
    """Rounds in order."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=MAX_ROUNDS)
        self._recent: deque[Record] = deque(maxlen=RECENT)

    @property
    def first(self) -> int | None:
        """The oldest round that is kept."""
        return self._lines[0][0] if self._lines else None

    @property
    def last(self) -> Record | None:
        """The newest round."""
        return self._recent[-1] if self._recent else None

    @property
    def reward_recent(self) -> float | None:
        """Mean reward of the last rounds."""
        return sum(record.reward_local for record in self._recent) / len(self._recent) if self._recent else None

    def add(self, record: Record, kinds: Mapping[str, float]) -> str:
        """Keep a round, in place of itself and of later ones from before a crash. Returns it as JSON."""
        self.rewind(record.round - 1)
        text = record.model_dump_json()
        known = {kind: round(reward, 5) for kind, reward in kinds.items()}
        line = f'{text[:-1]},"kinds":{json.dumps(known)}}}'
        self._lines.append((record.round, line))
        self._recent.append(record)
        return line

    def rewind(self, last_round: int) -> None:
        """Forget the rounds after `last_round`."""
        while self._lines and self._lines[-1][0] > last_round:
            self._lines.pop()
        while self._recent and self._recent[-1].round > last_round:
            self._recent.pop()

    def page(self, first: int | None, limit: int) -> str:
        """At most `limit` rounds from `first` on, or the newest, as a JSON list."""
        if first is None:
            begin = max(0, len(self._lines) - limit)
            lines = [line for _, line in islice(self._lines, begin, None)]
        else:
            lines = [line for _, line in islice((pair for pair in self._lines if pair[0] >= first), limit)]
        return f"[{','.join(lines)}]"

    def load(self, metrics: MetricsFile, kinds: Mapping[int, Mapping[str, float]]) -> None:
        """Take in what was recorded before the node's start. Raises RecordError."""
        for record in metrics.last(MAX_ROUNDS):
            self.add(record, kinds.get(record.round, {}))


def kinds_by_round(pool: Path) -> dict[int, dict[str, float]]:
    """Mean reward of each kind of task in each round whose own groups are still in the pool.

    Raises sqlite3.Error if the file cannot be read.
    """
    if not pool.exists():
        return {}
    found: dict[int, dict[str, float]] = {}
    with closing(sqlite3.connect(f"{pool.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT round, kind, avg(reward) FROM groups WHERE external = 0 GROUP BY round, kind")
        for number, kind, reward in rows:
            found.setdefault(number, {})[kind] = reward
    return found
