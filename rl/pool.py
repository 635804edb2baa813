"""The pool of scored rollout groups, in SQLite: what was sampled, by whom, and what it earned here.

Groups are kept as text, without the sampler's token ids and log-probs, since those mean nothing to another policy. The
database is in WAL mode with one writer, so a crash loses at most the last transaction and others may read meanwhile.
"""

import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from pydantic import TypeAdapter

from rl.rollouts import RolloutGroup, ScoredGroup
from verifiers.codec import pack, unpack

_GROUP = TypeAdapter(ScoredGroup)
_SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE groups (
    id INTEGER PRIMARY KEY,
    digest BLOB NOT NULL,
    round INTEGER NOT NULL,
    origin TEXT NOT NULL,
    kind TEXT NOT NULL,
    completions INTEGER NOT NULL,
    reward REAL NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (digest, origin)
);
CREATE INDEX groups_round ON groups (round);
"""


class PoolError(Exception):
    """The pool's file cannot be used. The message says what to do."""


@dataclass(frozen=True, slots=True)
class KindSuccess:
    """How one kind of task went: mean reward over `groups` groups."""

    kind: str
    groups: int
    reward: float


class SqlitePool:
    """Scored groups on disk, at most `max_groups` of them: the oldest go first."""

    def __init__(self, path: Path, max_groups: int) -> None:
        """Open or create the pool. Raises PoolError if the file is no pool of this version, or damaged."""
        self._max_groups = max_groups
        self._connection = sqlite3.connect(path, isolation_level=None)
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            self._connection.close()
            # A full disk or a lock says nothing about the file; the caller knows what to do about those.
            if isinstance(error, sqlite3.OperationalError):
                raise
            raise PoolError(
                f"{path} is damaged ({error}); move it away and start again, the policy does not need it"
            ) from error
        except PoolError:
            self._connection.close()
            raise

    def __enter__(self) -> "SqlitePool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def add(self, groups: Sequence[ScoredGroup]) -> int:
        """Keep these groups, all or none. Returns how many were new: an origin's group is kept once, whatever it says
        of the step it was sampled at.

        Raises sqlite3.OperationalError when the disk is full; the pool is then as before.
        """
        with self._transaction():
            before = self._connection.total_changes
            self._connection.executemany(
                "INSERT OR IGNORE INTO groups (digest, round, origin, kind, completions, reward, body)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                [_row(group) for group in groups],
            )
            added = self._connection.total_changes - before
            self._connection.execute(
                "DELETE FROM groups WHERE id IN (SELECT id FROM groups ORDER BY id DESC LIMIT -1 OFFSET ?)",
                (self._max_groups,),
            )
        return added

    def rewind(self, last_round: int, origin: str) -> int:
        """Forget what `origin` (this node) sampled after round `last_round`, since those rounds will be done again.

        What came from others stays: it will not come again. Returns how many groups went.
        """
        return self._connection.execute(
            "DELETE FROM groups WHERE round > ? AND origin = ?", (last_round, origin)
        ).rowcount

    def recent(self, limit: int) -> list[ScoredGroup]:
        """The newest groups, newest first."""
        rows = self._connection.execute("SELECT body FROM groups ORDER BY id DESC LIMIT ?", (limit,))
        return [_GROUP.validate_python(unpack(body)) for (body,) in rows]

    @staticmethod
    def success_in(path: Path, since_round: int, origin: str | None = None) -> list[KindSuccess]:
        """Mean reward of each kind of task since a round, of one origin or of all, by name; empty without a pool.

        Only reads, so a running node is not disturbed. Raises PoolError if the file is no pool.
        """
        if not path.exists():
            return []
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                rows = connection.execute(
                    "SELECT kind, count(*), avg(reward) FROM groups"
                    " WHERE round >= ? AND (? IS NULL OR origin = ?) GROUP BY kind ORDER BY kind",
                    (since_round, origin, origin),
                )
                return [KindSuccess(kind, count, reward) for kind, count, reward in rows]
        except sqlite3.DatabaseError as error:
            raise PoolError(f"{path} cannot be read as a pool: {error}") from error

    def __len__(self) -> int:
        (count,) = self._connection.execute("SELECT count(*) FROM groups").fetchone()
        return int(count)

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        # Enough for a crash of the process; a crash of the machine may lose the last rounds, never the file.
        self._connection.execute("PRAGMA synchronous = NORMAL")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._connection.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;"
            )
        elif version != _SCHEMA_VERSION:
            raise PoolError(
                f"the pool has layout {version}, this swarmnode knows {_SCHEMA_VERSION}: use the swarmnode that wrote"
                " it, or move pool.sqlite away (the policy does not need it)"
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            # SQLite has already rolled back after some errors, a full disk among them.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise


def _row(scored: ScoredGroup) -> tuple[bytes, int, str, str, int, float, bytes]:
    text_only = replace(scored, group=as_text(scored.group))
    return (
        _digest(text_only.group),
        scored.round,
        scored.origin,
        scored.group.task.kind,
        len(scored.rewards),
        scored.mean_reward,
        pack(_GROUP.dump_python(text_only)),
    )


def _digest(group: RolloutGroup) -> bytes:
    """Of what any node can compare: which task, and which answers. Not of what its sender or this node says of it."""
    ref = group.task.ref
    answers = [[completion.text, completion.finished] for completion in group.completions]
    return hashlib.sha256(pack([ref.verifier, ref.version, ref.config, ref.seed, ref.index, answers])).digest()


def as_text(group: RolloutGroup) -> RolloutGroup:
    """The group without token ids and log-probs."""
    return replace(group, completions=tuple(replace(c, tokens=None, logprobs=None) for c in group.completions))
