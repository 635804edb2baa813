"""What happens in the node, kept for those who look over HTTP: a view beside the operator's own.

Everything here is bounded, and telling it takes microseconds: nobody who looks can hold up a round. Whoever does not
keep up with the events is cut off, and may come again.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import trio

from node.api.errors import ApiError
from node.api.firsts import FirstSuccesses
from node.api.history import History
from node.api.models import LogLine, Progress
from node.record import Record
from node.snapshot import Snapshot
from node.view import NodeInfo, View
from rl.rollouts import ScoredGroup

MAX_READERS = 16
"""Event streams at a time. Browsers keep six to one server, so that is a few windows and programs."""

MAX_UNREAD = 256
"""Events that may wait for one reader: some ten seconds of the shortest rounds."""

MAX_LINES = 300
MAX_LINE = 2000
"""Lines of the log that are kept, and characters of each."""


class Totals:
    """Sums over the rounds since the node's start, for Prometheus; rounds that are done again count again."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()

    def add(self, record: Record) -> None:
        """One more round."""
        self.counts["rounds"] += 1
        for name in ("tokens_generated", "tokens_trained", "batches_sent", "batches_received"):
            self.counts[name] += getattr(record, name)
        for name in ("local_groups", "external_groups", "gate_refused", "engine_restarts"):
            self.counts[name] += getattr(record, name)
        for name in ("generate", "score", "update", "share"):
            self.seconds[name] += getattr(record, f"seconds_{name}")
        self.rejected.update(record.rejected)


class Feed:
    """`node.view.View` that hands everything on to `view` and remembers the newest of it."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._readers: set[trio.MemorySendChannel[bytes]] = set()
        self._phase_begun = time.monotonic()
        self.history = History()
        self.firsts = FirstSuccesses()
        self.totals = Totals()
        self.info: NodeInfo | None = None
        self.phase_name = "start"
        self.progress_now: Progress | None = None
        self.snapshot: Snapshot | None = None
        self.lines: deque[LogLine] = deque(maxlen=MAX_LINES)

    @property
    def phase_seconds(self) -> float:
        """How long the phase has lasted."""
        return time.monotonic() - self._phase_begun

    def started(self, info: NodeInfo) -> None:
        """See `node.view.View`."""
        self._view.started(info)
        self.info = info
        self.history.rewind(info.done)
        self.firsts.rewind(info.done)
        self._tell("started", {"model": info.model, "round": info.done})

    def phase(self, name: str) -> None:
        """See `node.view.View`."""
        self._view.phase(name)
        self.phase_name, self._phase_begun, self.progress_now = name, time.monotonic(), None
        self._tell("phase", {"phase": name})

    def progress(self, done: int, total: int, unit: str) -> None:
        """See `node.view.View`."""
        self._view.progress(done, total, unit)
        self.progress_now = Progress(done=done, total=total, unit=unit)

    def round_finished(self, record: Record, per_kind: Mapping[str, float], groups: Sequence[ScoredGroup]) -> None:
        """See `node.view.View`."""
        self._view.round_finished(record, per_kind, groups)
        self.totals.add(record)
        self.firsts.look(record.round, record.time, groups)
        line = self.history.add(record, per_kind)
        self._send("round", line)

    def network(self, snapshot: Snapshot) -> None:
        """See `node.view.View`."""
        self._view.network(snapshot)
        self.snapshot = snapshot

    def message(self, level: str, text: str) -> None:
        """See `node.view.View`. It comes back as a line of the log."""
        self._view.message(level, text)

    def log_line(self, line: LogLine) -> None:
        """A line of the log, of whatever part of the node."""
        line = line.model_copy(update={"text": line.text[:MAX_LINE]})
        self.lines.append(line)
        self._send("message", line.model_dump_json())

    def changed(self, state: str) -> None:
        """The operator has asked for something."""
        self._tell("state", {"state": state})

    def end(self) -> None:
        """The node stops: no reader waits for more."""
        for reader in self._readers:
            reader.close()
        self._readers.clear()

    @contextmanager
    def reading(self) -> Iterator[trio.MemoryReceiveChannel[bytes]]:
        """Events from now on, each as it is sent; the channel ends when its reader falls behind.

        Raises ApiError if there are too many readers.
        """
        if len(self._readers) >= MAX_READERS:
            raise ApiError(503, f"{MAX_READERS} event streams are open already", code="overloaded", again=True)
        send, receive = trio.open_memory_channel[bytes](MAX_UNREAD)
        self._readers.add(send)
        try:
            with receive:
                yield receive
        finally:
            self._readers.discard(send)
            send.close()

    def _tell(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._readers:
            self._send(kind, json.dumps(values))

    def _send(self, kind: str, data: str) -> None:
        """`data` is JSON, and so on one line."""
        event = f"event: {kind}\ndata: {data}\n\n".encode()
        for reader in list(self._readers):
            try:
                reader.send_nowait(event)
            except trio.WouldBlock:
                self._readers.discard(reader)
                reader.close()
            except trio.BrokenResourceError:
                self._readers.discard(reader)
