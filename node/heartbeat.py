"""What a node that runs measures of its event loop, and the file in which it says how its swarm stands: the writing end
of `node.snapshot`, apart from it since who only reads needs no event loop.
"""

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import trio

from node.snapshot import Lag, Snapshot

SECONDS = 1.0
"""Between two snapshots."""

BEAT_SECONDS = 0.02
LAG_SECONDS = 60.0
"""What the measured lag looks back."""


class Beat:
    """Measures the lag of the event loop it runs on."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque()

    async def run(self) -> NoReturn:
        """Sleep, and note by how much the sleep was too long."""
        while True:
            due = trio.current_time() + BEAT_SECONDS
            await trio.sleep_until(due)
            self._note(trio.current_time(), due)

    def _note(self, now: float, due: float) -> None:
        self._late.append((now, now - due))
        while self._late[0][0] < now - LAG_SECONDS:
            self._late.popleft()

    def lag(self) -> Lag:
        """Over the last minute."""
        late = sorted(1000 * seconds for _, seconds in self._late)
        if not late:
            return Lag()
        p50, p99 = (late[min(len(late) - 1, int(share * len(late)))] for share in (0.5, 0.99))
        return Lag(p50=round(p50, 2), p99=round(p99, 2), max=round(late[-1], 2))


class SnapshotFile:
    """`swarm.json`, written by the node that holds the data directory."""

    def __init__(self, path: Path, say: Callable[[str, str], None]) -> None:
        self._path = path
        self._new = path.with_name(f".{path.name}.new")
        self._say = say
        self._complained = False

    async def write(self, snapshot: Snapshot) -> None:
        """Replace the file. A disk that does not take it is a warning, once; the node does not need the file."""
        data = snapshot.model_dump_json().encode() + b"\n"
        try:
            # A rename waits where another file is being forced to disk, as checkpoints are.
            await trio.to_thread.run_sync(self._replace, data)
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._say(
                    "warning",
                    f"{self._path} cannot be written ({error.strerror or error}): training goes on, and `swarmnode"
                    " status` does not see the swarm meanwhile",
                )

    def remove(self) -> None:
        """At the node's end; best effort, since the file of an ended node is passed over anyway."""
        for path in (self._path, self._new):
            try:
                path.unlink(missing_ok=True)
            except OSError:
                return

    def _replace(self, data: bytes) -> None:
        self._new.write_bytes(data)
        os.replace(self._new, self._path)
