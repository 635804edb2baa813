"""What becomes of a node's groups elsewhere: in its batches each node tells how many groups of others it has used.

It is told in totals that only grow, not in differences: a batch that is lost, late or repeated changes nothing. What a
peer says of this node's groups is its word and no more. It counts only if the same batch held a group that passed this
node's checks, it can be no more than the groups that this node has sent, and nothing depends on it: not what is
trained on, and no reputation. It is shown.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from p2p.files import set_aside
from p2p.ids import public_key_of
from p2p.schema import MAX_USES
from p2p.wire import Use
from verifiers.base import MAX_SEED

MAX_PEERS = 1024
"""Nodes of which is remembered what was used of theirs, and as many that said what they used of this one's. Those with
least are forgotten first."""

_SPARE = 256
_MAX_FILE = 2**20

_Count = Annotated[int, Field(ge=0, le=MAX_SEED)]


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    admitted: _Count = 0
    trained: _Count = 0


_Table = dict[str, _Entry]


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    version: Annotated[int, Field(ge=1, le=1)]
    sent: _Count
    used: Annotated[_Table, Field(max_length=MAX_PEERS + _SPARE)]
    told: Annotated[_Table, Field(max_length=MAX_PEERS + _SPARE)]


@dataclass(frozen=True, slots=True)
class Told:
    """What became of the `sent` groups of this node, as others say: how often a node admitted one, or trained on it,
    and how many nodes say so. A group counts once for each node. Over all restarts.
    """

    sent: int = 0
    admitted: int = 0
    admitted_by: int = 0
    trained: int = 0
    trained_by: int = 0


class Contribution:
    """Counts of groups, by peer id, in both directions: what this node used of others, and what they say of its own."""

    def __init__(self, path: Path | None, own: str, say: Callable[[str, str], None] = lambda level, text: None) -> None:
        """`path` is where it is kept; None keeps it nowhere. Reads nothing until `load`."""
        self._path = path
        self._own = own
        self._say = say
        self._sent = 0
        self._used: _Table = {}
        self._told: _Table = {}
        self._news: dict[str, None] = {}

    def sent(self, groups: int) -> None:
        """So many groups of this node have gone out."""
        self._sent = min(self._sent + groups, MAX_SEED)

    def admitted(self, peer: str, groups: int) -> None:
        """So many groups of this peer passed the checks."""
        entry = self._entry(self._used, peer)
        entry.admitted = min(entry.admitted + groups, MAX_SEED)
        self._news[peer] = None

    def trained(self, groups: Mapping[str, int]) -> None:
        """So many groups of each peer were trained on for the first time."""
        for peer, count in groups.items():
            entry = self._entry(self._used, peer)
            entry.trained = min(entry.trained + count, MAX_SEED)
            self._news[peer] = None

    def news(self) -> tuple[Use, ...]:
        """What a batch can tell of what has changed since it was told; what has waited longest comes first."""
        return tuple(Use(peer, *_pair(self._used[peer])) for peer in [*self._news][:MAX_USES])

    def is_told(self, uses: Iterable[Use]) -> None:
        """A batch with these has gone out."""
        for use in uses:
            entry = self._used.get(use.peer)
            if entry is not None and _pair(entry) == (use.admitted, use.trained):
                self._news.pop(use.peer, None)

    def hear(self, reporter: str, uses: Iterable[Use]) -> None:
        """A batch of `reporter` told of these uses; those of this node's own groups count, up to what it has sent."""
        for use in uses:
            admitted, trained = min(use.admitted, self._sent), min(use.trained, self._sent)
            if use.peer == self._own and reporter != self._own and (admitted or trained):
                entry = self._entry(self._told, reporter)
                entry.admitted = max(entry.admitted, admitted)
                entry.trained = max(entry.trained, trained)

    def told_by(self, peer: str) -> tuple[int, int]:
        """How many of this node's groups a peer says it (admitted, trained on)."""
        return _pair(self._told.get(peer, _Entry()))

    def reporters(self) -> list[str]:
        """Who has told of uses."""
        return list(self._told)

    def told(self) -> Told:
        """All of it, summed up."""
        entries = self._told.values()
        return Told(
            self._sent,
            sum(entry.admitted for entry in entries),
            sum(entry.admitted > 0 for entry in entries),
            sum(entry.trained for entry in entries),
            sum(entry.trained > 0 for entry in entries),
        )

    def load(self) -> None:
        """Take over what was saved. A file that cannot be read is put aside, said, and counts as none."""
        if self._path is None or not self._path.exists():
            return
        try:
            with self._path.open("rb") as file:
                saved = _File.model_validate_json(file.read(_MAX_FILE + 1))
            for peer in (*saved.used, *saved.told):
                public_key_of(peer)
        except (OSError, ValueError) as error:
            self._set_aside(self._path, error)
            return
        self._sent, self._used, self._told = saved.sent, saved.used, saved.told
        # All is told again: what went out shortly before the end may have reached nobody.
        self._news = dict.fromkeys(self._used)

    def dump(self) -> bytes:
        """The file's content."""
        used, told = ({peer: entry.model_dump() for peer, entry in table.items()} for table in (self._used, self._told))
        return json.dumps({"version": 1, "sent": self._sent, "used": used, "told": told}).encode()

    def _entry(self, table: _Table, peer: str) -> _Entry:
        if peer not in table:
            if len(table) >= MAX_PEERS + _SPARE:
                kept = sorted(table, key=lambda other: _pair(table[other]), reverse=True)[:MAX_PEERS]
                for other in table.keys() - set(kept):
                    del table[other]
                self._news = {other: None for other in self._news if other in self._used}
            table[peer] = _Entry()
        return table[peer]

    def _set_aside(self, path: Path, error: Exception) -> None:
        what = str(error).splitlines()[0]
        try:
            then = f"was renamed to {set_aside(path).name}"
        except OSError as second:
            then = f"cannot be put aside ({second})"
        self._say("warning", f"{path} is damaged ({what}) and {then}: what others used is counted from now on")


def _pair(entry: _Entry) -> tuple[int, int]:
    return entry.admitted, entry.trained
