"""What this node thinks of the others, from what they sent: offences cost, fade, and end in bans that grow.

A peer's score is one number. 0 is a stranger; groups that were worth their check raise it a little, offences lower it,
and both fade with time. At `BAN_AT` the peer is banned. All of it is this node's own opinion and travels nowhere.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from p2p.files import replace_file, set_aside
from p2p.reasons import Reason

BAN_AT = -100.0
"""The score at which a peer is banned. The weights below are percentages of it."""

WEIGHTS: dict[Reason, float] = {
    # No honest program sends these, and a connection is authenticated, so chance cannot make them either. Several and
    # not one, since programs have faults.
    Reason.PROTOCOL: 25.0,
    Reason.TOO_LARGE: 35.0,
    Reason.DECODE: 35.0,
    Reason.SCHEMA: 35.0,
    # Forged, or passed on without looking: the worst that there is.
    Reason.SIGNATURE: 50.0,
    # A program of the next version that found the wrong topic; a nuisance.
    Reason.VERSION: 5.0,
    Reason.WRONG_SWARM: 10.0,
    # The clocks of honest people are wrong; and what is passed on may have become stale on its way.
    Reason.STALE: 0.0,
    # Counted only far beyond the rate at which batches are refused, so each is a small part of a flood.
    Reason.RATE: 1.0,
    Reason.REPLAY: 2.0,
    # Proven by two signatures. A key in use on two machines can do it as well, so not at once.
    Reason.EQUIVOCATION: 25.0,
    # Who is banned or not on the list is refused already; what others pass on of it is no fault of theirs.
    Reason.BANNED: 0.0,
    Reason.NOT_ALLOWED: 0.0,
    # Nodes that have another number of shards pass on in good faith what does not belong here.
    Reason.WRONG_SHARD: 0.0,
    # This node's own limits.
    Reason.OVERLOADED: 0.0,
    Reason.CAPPED: 0.0,
    Reason.TOO_LONG: 0.0,
    # Other verifiers and versions are allowed. A thousand a minute is not a swarm with other tasks.
    Reason.UNKNOWN_TASK: 0.001,
    # Groups that cannot have come from an honest run of this node's own version. A machine with a different library
    # makes other prompts honestly, but its groups are of no use here either.
    Reason.NO_SUCH_TASK: 10.0,
    Reason.HELD_OUT: 10.0,
    Reason.WRONG_PROMPT: 10.0,
    # Made to break or stall the scorer, or a weakness of this node's verifier.
    Reason.UNSCORABLE: 2.0,
}
"""What one offence costs. For offences inside a batch it is one for each group."""

HALF_LIFE = 3600.0
"""Seconds in which a score fades to half."""

CREDIT, MAX_CREDIT = 0.1, 20.0
"""What an admitted group earns, and the score above which it earns nothing: a peer cannot save up for an attack."""

BANS = (60.0, 600.0, 3600.0, 86400.0)
"""Seconds of the first, second, ... ban; the last one repeats."""

AFTER_BAN = -50.0
"""The score with which a peer comes back."""

FORGIVEN = 86400.0
"""Seconds since the last ban's end after which the next one is a step shorter again."""

MAX_PEERS = 4096
"""Peers that are remembered. The least remarkable are forgotten first."""

_SPARE = 512
_NEGLIGIBLE = 0.01
_LONG_AGO = 1e9
"""Seconds after which all is forgotten; what a damaged file says beyond them would overflow."""

_MAX_FILE = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Standing:
    """One peer's standing: its score, the seconds left of its ban (0 without one), and its bans of late."""

    peer: str
    score: float
    banned: float
    bans: int


class _Entry(BaseModel):
    """In the file `at` and `until` are seconds after the file's own time; in memory they are those of the clock."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    score: Annotated[float, Field(ge=2 * BAN_AT, le=MAX_CREDIT)] = 0.0
    at: float = 0.0
    until: float = 0.0
    bans: Annotated[int, Field(ge=0, le=len(BANS))] = 0


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    version: Annotated[int, Field(ge=1, le=1)]
    saved: float
    peers: Annotated[dict[str, _Entry], Field(max_length=MAX_PEERS + _SPARE)]


class Reputation:
    """Scores and bans of peers, by peer id. `on_ban` is told of each ban that begins.

    While the node runs, time is that of `clock`, which nobody sets; `now` (unix seconds) serves only to tell how long
    the node was away. A clock set back cannot prolong a ban, and one set forward ends none that is running.
    """

    def __init__(
        self,
        path: Path | None,
        on_ban: Callable[[str], None],
        now: Callable[[], float] = time.time,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str, str], None] = lambda level, text: None,
    ) -> None:
        """`path` is where it is kept; None keeps it nowhere. Reads nothing until `load`."""
        self._path = path
        self._on_ban = on_ban
        self._now = now
        self._clock = clock
        self._say = say
        self._entries: dict[str, _Entry] = {}

    def offence(self, peer: str, reason: Reason, count: int = 1) -> None:
        """The peer did this, `count` times. Bans it if that was too much; while it is banned nothing is added."""
        weight = WEIGHTS[reason] * count
        if weight == 0 or self.banned(peer):
            return
        entry = self._faded(peer)
        entry.score = max(entry.score - weight, 2 * BAN_AT)
        if entry.score <= BAN_AT:
            self._ban(peer, entry)

    def credit(self, peer: str, groups: int) -> None:
        """So many of the peer's groups were admitted. While it is banned that earns nothing."""
        if self.banned(peer):
            return
        entry = self._faded(peer)
        if entry.score < MAX_CREDIT:
            entry.score = min(entry.score + CREDIT * groups, MAX_CREDIT)

    def banned(self, peer: str) -> float:
        """Seconds left of the peer's ban; 0 if there is none."""
        entry = self._entries.get(peer)
        return max(entry.until - self._clock(), 0.0) if entry is not None else 0.0

    def score(self, peer: str) -> float:
        """The peer's score now: 0 for a stranger, at most `MAX_CREDIT`, negative is bad."""
        entry = self._entries.get(peer)
        return _score(entry, self._clock()) if entry is not None else 0.0

    def standings(self) -> list[Standing]:
        """All peers that are not strangers, the worst first."""
        now = self._clock()
        rows = [
            Standing(peer, _score(entry, now), max(entry.until - now, 0.0), _bans(entry, now))
            for peer, entry in self._entries.items()
        ]
        return sorted(rows, key=lambda row: (-row.banned, row.score, row.peer))

    def load(self) -> None:
        """Take over what was saved. A file that cannot be read is put aside, said, and counts as none.

        Nobody is told of bans that still run: see `standings`.
        """
        if self._path is None or not self._path.exists():
            return
        try:
            with self._path.open("rb") as file:
                saved = _File.model_validate_json(file.read(_MAX_FILE + 1))
        except (OSError, ValidationError) as error:
            self._set_aside(self._path, error)
            return
        away = min(max(self._now() - saved.saved, 0.0), _LONG_AGO)
        start = self._clock() - away
        for peer, entry in saved.peers.items():
            # Whatever the file says, no ban is longer than the longest.
            entry.at = start + max(min(entry.at, BANS[-1]), -_LONG_AGO)
            entry.until = start + max(min(entry.until, BANS[-1]), -_LONG_AGO)
            self._entries[peer] = entry
        self._forget()

    def save(self) -> None:
        """Write the file, whole or not at all. Raises OSError."""
        if self._path is not None:
            replace_file(self._path, self.dump())

    def dump(self) -> bytes:
        """The file's content, for a caller that writes elsewhere."""
        self._forget()
        now = self._clock()
        peers = {
            peer: {"score": entry.score, "at": entry.at - now, "until": entry.until - now, "bans": entry.bans}
            for peer, entry in self._entries.items()
        }
        return json.dumps({"version": 1, "saved": self._now(), "peers": peers}, allow_nan=False).encode()

    def _faded(self, peer: str) -> _Entry:
        """The peer's entry, brought up to now."""
        now = self._clock()
        entry = self._entries.get(peer)
        if entry is None:
            if len(self._entries) >= MAX_PEERS + _SPARE:
                self._forget()
            entry = self._entries[peer] = _Entry(at=now, until=now)
        entry.score, entry.at = _score(entry, now), now
        return entry

    def _ban(self, peer: str, entry: _Entry) -> None:
        now = self._clock()
        before = _bans(entry, now)
        entry.until = now + BANS[min(before, len(BANS) - 1)]
        entry.bans = min(before + 1, len(BANS))
        entry.score, entry.at = AFTER_BAN, entry.until
        self._on_ban(peer)

    def _forget(self) -> None:
        """Drop strangers, and the least remarkable beyond `MAX_PEERS`: bans that run stay longest."""
        now = self._clock()

        def weight(peer: str) -> tuple[bool, int, float]:
            entry = self._entries[peer]
            return entry.until > now, _bans(entry, now), abs(_score(entry, now))

        kept = [peer for peer in self._entries if weight(peer) > (False, 0, _NEGLIGIBLE)]
        kept = sorted(kept, key=weight, reverse=True)[:MAX_PEERS]
        self._entries = {peer: self._entries[peer] for peer in kept}

    def _set_aside(self, path: Path, error: Exception) -> None:
        what = str(error).splitlines()[0]
        try:
            aside = set_aside(path)
        except OSError as second:
            self._say(
                "warning", f"{path} cannot be read ({what}) nor put aside ({second}): all peers are strangers again"
            )
            return
        self._say(
            "warning", f"{path} is damaged ({what}) and was renamed to {aside.name}: all peers are strangers again"
        )


def _score(entry: _Entry, now: float) -> float:
    """Faded since `entry.at`, which is in the future while a ban runs."""
    return float(entry.score * 0.5 ** (max(now - entry.at, 0.0) / HALF_LIFE))


def _bans(entry: _Entry, now: float) -> int:
    """Bans that still make the next one longer."""
    return max(entry.bans - int(max(now - entry.until, 0.0) / FORGIVEN), 0)
