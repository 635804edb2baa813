"""The pool of scored rollout groups, in SQLite: what was sampled, by whom, what it earned here, who trained on it when.

Groups are kept as text, without the sampler's token ids and log-probs, since those mean nothing to another policy. The
database is in WAL mode with one writer, so a crash loses at most the last transaction and others may read meanwhile.

Own groups and external ones (those of other nodes) have half of the room each, so neither can push the other out. Every
call is a few milliseconds of work on a full pool of 4096 groups: the event loop may make it.
"""

import hashlib
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from pydantic import TypeAdapter

from rl.rollouts import RolloutGroup, ScoredGroup
from rl.selection import Candidate
from verifiers.codec import pack, unpack

_GROUP = TypeAdapter(ScoredGroup)
_SCHEMA_VERSION = 2
# Ids grow and never come back (AUTOINCREMENT): their order is that of arrival, and one names the same group for ever.
# `round`: in which an own group was sampled, or an external one came. `usable` is 0 for a group that was refused, and
# for one whose task and answers were here already, as when a node sends another's as its own: once is enough.
_SCHEMA = """
CREATE TABLE groups (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL,
    round INTEGER NOT NULL,
    origin TEXT NOT NULL,
    external INTEGER NOT NULL,
    informative INTEGER NOT NULL,
    usable INTEGER NOT NULL DEFAULT 1,
    kind TEXT NOT NULL,
    completions INTEGER NOT NULL,
    reward REAL NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (digest, origin)
);
CREATE INDEX groups_round ON groups (round);
CREATE INDEX groups_kept ON groups (external, informative, id);
CREATE INDEX groups_origin ON groups (origin, external, id);
CREATE INDEX groups_candidates ON groups (id, round, origin, kind, completions, reward)
    WHERE external = 1 AND informative = 1 AND usable = 1;
CREATE TABLE draws (
    id INTEGER NOT NULL REFERENCES groups ON DELETE CASCADE,
    round INTEGER NOT NULL,
    PRIMARY KEY (id, round)
) WITHOUT ROWID;
CREATE INDEX draws_round ON draws (round);
"""
# Layout 1 knew no other nodes: all that is in it is this node's own, whatever its id was called.
_FROM_1 = f"""
ALTER TABLE groups RENAME TO old;
DROP INDEX groups_round;
{_SCHEMA}
INSERT OR IGNORE INTO groups (digest, round, origin, external, informative, kind, completions, reward, body)
    SELECT digest, round, :own, 0, reward > 0 AND reward < 1, kind, completions, reward, body FROM old ORDER BY id;
DROP TABLE old;
"""
_MOST_CANDIDATES = 4096
"""Newest external groups among which a round chooses."""


class PoolError(Exception):
    """The pool's file cannot be used. The message says what to do."""


@dataclass(frozen=True, slots=True)
class KindSuccess:
    """How one kind of task went: mean reward over `groups` groups."""

    kind: str
    groups: int
    reward: float


class SqlitePool:
    """Scored groups on disk: of the node `own` and of others, at most `max_groups` in all.

    Half are own ones, of which the oldest go first. Half are external ones, of which those without anything to learn go
    first, then the oldest; one origin has at most `per_peer` of them, and loses its oldest first.
    """

    def __init__(self, path: Path, own: str, max_groups: int = 4096, per_peer: int = 512) -> None:
        """Open or create the pool. Raises PoolError if the file is no pool of a known layout, or damaged."""
        self._own = own
        self._max_external = max_groups // 2
        self._max_own = max_groups - self._max_external
        self._per_peer = per_peer
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
                "INSERT OR IGNORE INTO groups"
                " (digest, round, origin, external, informative, kind, completions, reward, body, usable)"
                " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, NOT EXISTS (SELECT 1 FROM groups WHERE digest = ?1))",
                [self._row(group) for group in groups],
            )
            added = self._connection.total_changes - before
            self._make_room({group.origin for group in groups})
        return added

    def _make_room(self, origins: set[str]) -> None:
        for origin in origins - {self._own}:
            self._connection.execute(
                "DELETE FROM groups WHERE id IN (SELECT id FROM groups WHERE origin = ? AND external = 1"
                " ORDER BY id DESC LIMIT -1 OFFSET ?)",
                (origin, self._per_peer),
            )
        self._connection.execute(
            "DELETE FROM groups WHERE id IN (SELECT id FROM groups WHERE external = 0"
            " ORDER BY id DESC LIMIT -1 OFFSET ?)",
            (self._max_own,),
        )
        self._connection.execute(
            "DELETE FROM groups WHERE id IN (SELECT id FROM groups WHERE external = 1"
            " ORDER BY informative DESC, id DESC LIMIT -1 OFFSET ?)",
            (self._max_external,),
        )

    def candidates(self, since: int, reuse: int) -> list[Candidate]:
        """See `rl.protocols.Pool`. The newest 4096 at most."""
        trust = self._trust(since)
        rows = self._connection.execute(
            "SELECT groups.id, origin, groups.round, kind, completions, reward, count(draws.id) AS uses"
            " FROM groups INDEXED BY groups_candidates LEFT JOIN draws ON draws.id = groups.id"
            " WHERE external = 1 AND informative = 1 AND usable = 1 AND groups.round >= ?"
            " GROUP BY groups.id HAVING uses < ? ORDER BY groups.id DESC LIMIT ?",
            (since, reuse, _MOST_CANDIDATES),
        )
        found = [
            Candidate(key, origin, number, kind, completions, reward, uses, trust.get(origin, 1.0))
            for key, origin, number, kind, completions, reward, uses in rows
        ]
        return found[::-1]

    def _trust(self, since: int) -> dict[str, float]:
        """See `rl.selection.Candidate`. One good group is taken for granted."""
        rows = self._connection.execute(
            "SELECT origin, sum(usable), count(*) FROM groups WHERE external = 1 AND round >= ?"
            " AND id IN (SELECT id FROM draws) GROUP BY origin",
            (since,),
        )
        # What was refused for other reasons has never been in a round.
        return {origin: (1 + passed) / (1 + tried) for origin, passed, tried in rows}

    def take(self, ids: Collection[int]) -> dict[int, ScoredGroup]:
        """See `rl.protocols.Pool`; in the order of `ids`."""
        found: dict[int, ScoredGroup] = {}
        for key in ids:
            row = self._connection.execute("SELECT body, origin, round FROM groups WHERE id = ?", (key,)).fetchone()
            if row is not None:
                found[key] = _group(*row)
        return found

    def settle(self, used: Collection[int], refused: Collection[int], number: int) -> None:
        """See `rl.protocols.Pool`. Raises sqlite3.OperationalError when the disk is full; nothing is noted then."""
        with self._transaction():
            self._connection.executemany(
                "INSERT OR IGNORE INTO draws SELECT id, ? FROM groups WHERE id = ?", [(number, key) for key in used]
            )
            self._connection.executemany("UPDATE groups SET usable = 0 WHERE id = ?", [(key,) for key in refused])

    def rewind(self, last_round: int) -> int:
        """Forget the own groups and the uses of external ones after round `last_round`: those rounds are done again.

        What came from others stays, since it will not come again, and counts as having come in the first of those
        rounds. Returns how many groups went.
        """
        with self._transaction():
            self._connection.execute("DELETE FROM draws WHERE round > ?", (last_round,))
            gone = self._connection.execute(
                "DELETE FROM groups WHERE round > ? AND external = 0", (last_round,)
            ).rowcount
            self._connection.execute("UPDATE groups SET round = ? WHERE round > ?", (last_round + 1, last_round + 1))
        return gone

    def holds(self, group: RolloutGroup) -> bool:
        """Whether this task with these very answers is here, whoever sent it."""
        row = self._connection.execute("SELECT 1 FROM groups WHERE digest = ? LIMIT 1", (_digest(group),)).fetchone()
        return row is not None

    def room_for(self, origin: str) -> int:
        """How many more groups of another origin there is room for before its own oldest go."""
        row = self._connection.execute("SELECT count(*) FROM groups WHERE origin = ? AND external = 1", (origin,))
        return max(0, min(self._per_peer, self._max_external) - int(row.fetchone()[0]))

    @staticmethod
    def read(path: Path, since_round: int = 0, origin: str | None = None) -> Iterator[ScoredGroup]:
        """The groups since a round, of one origin or of all, in the order in which they came; none without a pool.

        Only reads, so a running node is not disturbed, and sees the pool as it is at the first one. Raises PoolError if
        the file is no pool.
        """
        if not path.exists():
            return
        try:
            with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
                rows = connection.execute(
                    "SELECT body, origin, round FROM groups WHERE round >= ? AND (? IS NULL OR origin = ?) ORDER BY id",
                    (since_round, origin, origin),
                )
                for row in rows:
                    yield _group(*row)
        except sqlite3.DatabaseError as error:
            raise PoolError(f"{path} cannot be read as a pool: {error}") from error

    def recent(self, limit: int) -> list[ScoredGroup]:
        """The newest groups, newest first."""
        rows = self._connection.execute("SELECT body, origin, round FROM groups ORDER BY id DESC LIMIT ?", (limit,))
        return [_group(*row) for row in rows]

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
        self._connection.execute("PRAGMA foreign_keys = ON")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version in (0, 1):
            with self._transaction():
                for statement in (_SCHEMA if version == 0 else _FROM_1).split(";"):
                    self._connection.execute(statement, {"own": self._own})
                self._connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
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

    def _row(self, scored: ScoredGroup) -> tuple[bytes, int, str, bool, bool, str, int, float, bytes]:
        text_only = replace(scored, group=as_text(scored.group))
        return (
            _digest(text_only.group),
            scored.round,
            scored.origin,
            scored.origin != self._own,
            scored.informative,
            scored.group.task.kind,
            len(scored.rewards),
            scored.mean_reward,
            pack(_GROUP.dump_python(text_only)),
        )


def _group(body: bytes, origin: str, number: int) -> ScoredGroup:
    return replace(_GROUP.validate_python(unpack(body)), origin=origin, round=number)


def _digest(group: RolloutGroup) -> bytes:
    """Of what any node can compare: which task, and which answers. Not of what its sender or this node says of it."""
    ref = group.task.ref
    answers = [[completion.text, completion.finished] for completion in group.completions]
    return hashlib.sha256(pack([ref.verifier, ref.version, ref.config, ref.seed, ref.index, answers])).digest()


def as_text(group: RolloutGroup) -> RolloutGroup:
    """The group without token ids and log-probs."""
    return replace(group, completions=tuple(replace(c, tokens=None, logprobs=None) for c in group.completions))
