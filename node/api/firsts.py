"""First successes: the round in which the node first solved a task of a kind itself, and what of others came before.

`firsts.json` in the data directory keeps them, since the pool forgets. It is written in the background, seldom (once a
kind of task), and a disk that does not take it costs nothing but the memory of it.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import trio
from pydantic import TypeAdapter, ValidationError

from node import logs
from node.api.models import First, Firsts, Forerunner
from node.datadir import write_atomically
from rl.rollouts import ScoredGroup
from verifiers.codec import unpack

MAX_KINDS = 1000
"""Kinds of task that are followed; a mix has a few dozen at most."""

RIGHT = 1 - 1e-6

_GROUP = TypeAdapter(ScoredGroup)


class FirstSuccesses:
    """What is known, by kind of task."""

    def __init__(self) -> None:
        self._firsts: dict[str, First] = {}
        self._unsure: list[str] = []
        self._news = trio.Event()

    def all(self) -> Firsts:
        """Oldest first."""
        return Firsts(firsts=sorted(self._firsts.values(), key=lambda first: (first.round, first.kind)))

    def look(self, number: int, time: float, groups: Sequence[ScoredGroup]) -> None:
        """Take in the own groups of a finished round."""
        for scored in groups:
            kind = scored.group.task.kind
            if kind not in self._firsts and _solved(scored) and len(self._firsts) < MAX_KINDS:
                self._firsts[kind] = First(kind=kind, round=number, time=time, forerunner=None)
                self._unsure.append(kind)
                self._news.set()

    def rewind(self, last_round: int) -> None:
        """Rounds after `last_round` are done again."""
        self._firsts = {kind: first for kind, first in self._firsts.items() if first.round <= last_round}
        self._unsure = [kind for kind in self._unsure if kind in self._firsts]

    def load(self, path: Path, pool: Path) -> None:
        """What an earlier run has left; without a file, what the pool knows of it. Raises OSError, sqlite3.Error."""
        try:
            found = Firsts.model_validate_json(path.read_bytes()).firsts
        except FileNotFoundError:
            found = _from_pool(pool)
        except ValidationError:
            logs.get().warning(f"{path} is damaged and passed over: first successes are told from the pool")
            found = _from_pool(pool)
        self._firsts = {first.kind: first for first in found[:MAX_KINDS]}

    async def keep(self, path: Path, pool: Path, limiter: trio.CapacityLimiter) -> NoReturn:
        """Find out what came before each new success, and keep the file current."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            kinds, self._unsure = self._unsure, []
            for kind in kinds:
                first = self._firsts.get(kind)
                if first is None:
                    continue
                try:
                    forerunner = await trio.to_thread.run_sync(
                        find_forerunner, pool, kind, first.round, limiter=limiter
                    )
                except sqlite3.Error as error:
                    logs.get().debug(f"the pool cannot be looked at: {error}")
                    continue
                if self._firsts.get(kind) == first:
                    self._firsts[kind] = first.model_copy(update={"forerunner": forerunner})
            data = self.all().model_dump_json().encode() + b"\n"
            try:
                await trio.to_thread.run_sync(write_atomically, path, data, limiter=limiter)
            except OSError as error:
                logs.get().debug(f"first successes are not kept: {error}")


def find_forerunner(pool: Path, kind: str, number: int) -> Forerunner | None:
    """The group of another node with a right answer to a task of that kind that was here before round `number`.

    One that was trained on before it counts more than one that was not, then the earlier. Raises sqlite3.Error.
    """
    with closing(_open(pool)) as connection:
        rows = connection.execute(
            "SELECT origin, groups.round, min(draws.round) AS trained, body FROM groups"
            " LEFT JOIN draws ON draws.id = groups.id AND draws.round < ?2"
            " WHERE external = 1 AND kind = ?1 AND reward > 0 AND groups.round < ?2"
            " GROUP BY groups.id ORDER BY trained IS NULL, trained, groups.id",
            (kind, number),
        )
        for origin, came, trained, body in rows:
            if _solved(_GROUP.validate_python(unpack(body))):
                return Forerunner(origin=origin, round=came, trained_in=trained)
    return None


def _solved(scored: ScoredGroup) -> bool:
    """Whether a completion is right. Some verifiers also reward a part of an answer, or its form."""
    return max(scored.rewards) >= RIGHT


def _from_pool(pool: Path) -> list[First]:
    if not pool.exists():
        return []
    found: dict[str, int] = {}
    with closing(_open(pool)) as connection:
        rows = connection.execute(
            "SELECT kind, round, body FROM groups WHERE external = 0 AND reward > 0 ORDER BY round, id"
        )
        for kind, number, body in rows:
            if kind not in found and _solved(_GROUP.validate_python(unpack(body))):
                found[kind] = number
    return [
        First(kind=kind, round=number, time=None, forerunner=find_forerunner(pool, kind, number))
        for kind, number in found.items()
    ]


def _open(pool: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{pool.absolute().as_uri()}?mode=ro", uri=True)
