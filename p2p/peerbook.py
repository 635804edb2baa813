"""The peer book: nodes that were met or heard of, remembered over restarts in `peers.json`.

What is heard of (mDNS, the DHT) is written by anybody, so it is bounded, and it never pushes out a node that was met.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from p2p.addresses import MAX_ADDRESS, Address, parse_address
from p2p.files import replace_file, set_aside
from p2p.ids import public_key_of

MAX_PEERS = 512
MAX_ADDRESSES = 8
"""Addresses of one peer. A machine has a few interfaces; an old address of a moved one is pushed out in the end."""

MAX_SURE = 6
"""Those of them that no hearsay pushes out: which the peer itself has told, or at which it was found."""

_MAX_FILE = 16 * 2**20
"""Bytes. The largest book is smaller; anything larger is not one, and is not read into memory."""

Say = Callable[[str, str], None]
"""Tells the operator: a level (info, warning, error) and a text."""


@dataclass(slots=True)
class Peer:
    """A remembered node. Times are in seconds since 1970; `met` is 0 for one that is known by hearsay alone.

    `addresses` are direct or through a relay, never names; what led here last comes first, then the newest.
    """

    peer: str
    heard: float
    met: float = 0.0
    successes: int = 0
    failures: int = 0
    addresses: list[Address] = field(default_factory=list)
    sure: dict[Address, None] = field(default_factory=dict, compare=False)
    """Addresses that are not hearsay; not kept over a restart."""

    def shorten(self) -> None:
        """Drop addresses that are too many: what is sure stays longest, then what is new."""
        while len(self.sure) > MAX_SURE:
            del self.sure[next(iter(self.sure))]
        while len(self.addresses) > MAX_ADDRESSES:
            self.addresses.remove(next(one for one in reversed(self.addresses) if one not in self.sure))


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    peer: str
    heard: float = Field(ge=0)
    met: float = Field(ge=0)
    successes: int = Field(ge=0)
    failures: int = Field(ge=0)
    addresses: Annotated[list[Annotated[str, Field(max_length=MAX_ADDRESS)]], Field(max_length=MAX_ADDRESSES)]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int = Field(ge=1, le=1)
    peers: Annotated[list[_Entry], Field(max_length=MAX_PEERS)]


class PeerBook:
    """The book in memory. `load` and `save` are the only things that touch the disk; without a path they do nothing."""

    def __init__(self, path: Path | None, say: Say, now: Callable[[], float] = time.time) -> None:
        self._path = path
        self._say = say
        self._now = now
        self._peers: dict[str, Peer] = {}
        self._changed = False
        self._warned = False

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, peer: str) -> bool:
        return peer in self._peers

    def get(self, peer: str) -> Peer | None:
        """What is known of a peer."""
        return self._peers.get(peer)

    def peers(self) -> list[Peer]:
        """All, those met last first."""
        return sorted(self._peers.values(), key=lambda known: (known.met, known.heard), reverse=True)

    def heard_of(self, address: Address, sure: bool = False) -> bool:
        """Note an address that somebody tells, `sure` if that is the peer itself. Returns whether it is news. Names and
        nameless peers are not kept."""
        return self._note(address, first=False, sure=sure)

    def reached(self, address: Address) -> None:
        """Note that a dial of this address found its peer."""
        self._note(address, first=True, sure=True)
        if (known := self._peers.get(address.peer or "")) is not None:
            known.successes += 1
            known.failures = 0

    def met(self, peer: str) -> None:
        """Note that a peer is connected now, and stays; if it is in the book."""
        if (known := self._peers.get(peer)) is not None:
            known.met = self._now()
            known.failures = 0
            self._changed = True

    def failed(self, peer: str) -> None:
        """Note that none of a peer's addresses led to it."""
        if (known := self._peers.get(peer)) is not None:
            known.failures += 1
            self._changed = True

    def forget(self, peer: str) -> None:
        """Cross a peer out."""
        self._changed |= self._peers.pop(peer, None) is not None

    def _note(self, address: Address, first: bool, sure: bool) -> bool:
        if address.peer is None or address.is_name or address.port == 0:
            return False
        known = self._peers.get(address.peer)
        if known is None:
            known = self._peers[address.peer] = Peer(address.peer, heard=self._now())
            if len(self._peers) > MAX_PEERS:
                self._drop_least(first)
        is_news = address not in known.addresses
        if first:
            known.addresses = [address, *(other for other in known.addresses if other != address)]
        elif is_news:
            # The address that led there last keeps its place: hearsay must not bury it.
            at = 1 if known.met and known.addresses else 0
            known.addresses.insert(at, address)
        if sure:
            known.sure[address] = None
        known.shorten()
        self._changed |= first or is_news
        return is_news and address.peer in self._peers

    def _drop_least(self, keep_newest: bool) -> None:
        """Of those never met, the one heard of first; if all were met, the one met longest ago."""
        candidates = list(self._peers.values())
        if keep_newest:
            candidates.pop()
        least = min(candidates, key=lambda known: (known.met, -known.failures, known.heard))
        del self._peers[least.peer]

    def load(self) -> None:
        """Read the file. One that is damaged is set aside, and one that cannot be read is left; both are said."""
        if self._path is None or not self._path.exists():
            return
        try:
            if self._path.stat().st_size > _MAX_FILE:
                raise ValueError(f"it is larger than {_MAX_FILE // 2**20} MB")
            entries = _File.model_validate_json(self._path.read_bytes()).peers
            self._peers = {known.peer: known for known in _peers(entries)}
        except OSError as error:
            self._say("warning", f"the remembered peers in {self._path} cannot be read: {error.strerror}")
        except ValueError as error:
            self._set_aside(error)

    def save(self) -> None:
        """Write the file if anything has changed. A failure is said once, and tried again the next time."""
        if self._path is None or not self._changed:
            return
        try:
            self.write(self.dump())
        except OSError as error:
            self.not_written(error)

    def take_changes(self) -> bytes | None:
        """The file's new content, if anything has changed since the last call: for a caller that writes elsewhere."""
        return self.dump() if self._path is not None and self._changed else None

    def dump(self) -> bytes:
        """The file's content. What changes from here on counts as not saved."""
        self._changed = False
        peers = [
            _Entry(
                peer=known.peer,
                heard=known.heard,
                met=known.met,
                successes=known.successes,
                failures=known.failures,
                addresses=[str(address) for address in known.addresses],
            )
            for known in self.peers()
        ]
        return _File(version=1, peers=peers).model_dump_json(indent=1).encode()

    def write(self, data: bytes) -> None:
        """Replace the file; safe in a thread. Raises OSError."""
        if self._path is not None:
            replace_file(self._path, data)

    def not_written(self, error: OSError) -> None:
        """Take note that `write` failed."""
        self._changed = True
        if not self._warned:
            self._say("warning", f"the peers met cannot be written to {self._path}, and go on unwritten: {error}")
        self._warned = True

    def _set_aside(self, error: ValueError) -> None:
        assert self._path is not None
        reason = f"{error.error_count()} errors in it" if isinstance(error, ValidationError) else str(error)
        try:
            where = f"it is set aside as {set_aside(self._path).name}"
        except OSError as problem:
            where = f"it cannot be set aside: {problem.strerror}"
        self._say("warning", f"the remembered peers in {self._path} are damaged ({reason}); {where}")


def _peers(entries: Iterable[_Entry]) -> Iterable[Peer]:
    """Raises ValueError for a peer id or an address that is none."""
    for entry in entries:
        public_key_of(entry.peer)
        addresses = [parse_address(text) for text in entry.addresses]
        if any(address.peer != entry.peer or address.is_name for address in addresses):
            raise ValueError(f"an address of {entry.peer} is not its own")
        yield Peer(entry.peer, entry.heard, entry.met, entry.successes, entry.failures, addresses)
