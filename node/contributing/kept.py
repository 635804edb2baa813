"""What has been answered and not been sent yet, and which task is next: it outlives the process."""

import sqlite3
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType

from pydantic import TypeAdapter

from node.errors import NodeError
from rl.rollouts import ScoredGroup
from verifiers.codec import pack, unpack

FILE = "contributions.sqlite"

MAX_KEPT = 256
"""Groups that wait to be sent. Who answers more before there is anybody to send them to waits, too."""

_LAYOUT = 1
_GROUP: TypeAdapter[ScoredGroup] = TypeAdapter(ScoredGroup)


class KeptError(NodeError):
    """The file cannot be used."""


class Kept:
    """Groups in the order in which they were made, beside the cursor of the task stream with `seed`."""

    def __init__(self, path: Path, seed: int) -> None:
        """Open or create the file. Raises KeptError if it is damaged or of another layout; sqlite3.OperationalError."""
        self._seed = str(seed)
        self._connection = sqlite3.connect(path, isolation_level=None)
        try:
            self._prepare(path)
        except sqlite3.OperationalError:
            self._connection.close()
            raise
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise KeptError(f"{path} is damaged ({error}): move it away; answers not sent yet are lost") from error
        except KeptError:
            self._connection.close()
            raise

    def _prepare(self, path: Path) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        (layout,) = self._connection.execute("PRAGMA user_version").fetchone()
        if layout not in (0, _LAYOUT):
            raise KeptError(f"{path} has layout {layout}, this swarmnode knows {_LAYOUT}: move it away")
        self._connection.execute("CREATE TABLE IF NOT EXISTS groups (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        self._connection.execute("CREATE TABLE IF NOT EXISTS places (name TEXT PRIMARY KEY, place INTEGER NOT NULL)")
        self._connection.execute("CREATE TABLE IF NOT EXISTS streams (seed TEXT PRIMARY KEY)")
        self._connection.execute(f"PRAGMA user_version = {_LAYOUT}")

    def __enter__(self) -> "Kept":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def __len__(self) -> int:
        (count,) = self._connection.execute("SELECT count(*) FROM groups").fetchone()
        return int(count)

    @property
    def cursor(self) -> Mapping[str, int]:
        """Where the task stream goes on; empty for its beginning."""
        if self._connection.execute("SELECT 1 FROM streams WHERE seed = ?", (self._seed,)).fetchone() is None:
            return {}
        return dict(self._connection.execute("SELECT name, place FROM places").fetchall())

    def add(self, group: ScoredGroup | None, cursor: Mapping[str, int]) -> None:
        """Note that the tasks before `cursor` are done with, and keep the group that came of it, if one did.

        Raises sqlite3.OperationalError when the disk is full; nothing is noted then.
        """
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            if group is not None:
                self._connection.execute("INSERT INTO groups (body) VALUES (?)", (pack(_GROUP.dump_python(group)),))
            self._connection.execute("DELETE FROM streams")
            self._connection.execute("DELETE FROM places")
            self._connection.execute("INSERT INTO streams VALUES (?)", (self._seed,))
            self._connection.executemany("INSERT INTO places VALUES (?, ?)", list(cursor.items()))
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def first(self, count: int) -> dict[int, ScoredGroup]:
        """The oldest groups, by their numbers here."""
        rows = self._connection.execute("SELECT id, body FROM groups ORDER BY id LIMIT ?", (count,))
        return {key: _GROUP.validate_python(unpack(body)) for key, body in rows}

    def remove(self, keys: Collection[int]) -> None:
        """They have been sent."""
        self._connection.executemany("DELETE FROM groups WHERE id = ?", [(key,) for key in keys])
