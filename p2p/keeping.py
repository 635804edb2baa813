"""What the swarm remembers over restarts, written now and then while it runs and once more at its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import trio

from p2p.files import replace_file

SECONDS, SOONEST = 60.0, 2.0


@dataclass(frozen=True, slots=True)
class Kept:
    """A file (None: nowhere), what makes its content, and what is lost if the disk does not take it."""

    path: Path | None
    dump: Callable[[], bytes]
    lost: str


class Keeper:
    """Writes files. A disk that does not take one is a warning, once: the swarm goes on."""

    def __init__(self, files: Sequence[Kept], say: Callable[[str, str], None]) -> None:
        self._files = [(file.path, file) for file in files if file.path is not None]
        self._say = say
        self._complained: set[Path] = set()
        self._hurry = trio.Event()

    def hurry(self) -> None:
        """Something has happened that is not to be lost: write soon."""
        self._hurry.set()

    async def save_now_and_then(self) -> NoReturn:
        """Every minute, and soon after `hurry`. In a thread, since a disk may take its time."""
        while True:
            await trio.sleep(SOONEST)
            with trio.move_on_after(SECONDS):
                await self._hurry.wait()
            self._hurry = trio.Event()
            for path, file in self._files:
                try:
                    await trio.to_thread.run_sync(replace_file, path, file.dump())
                except OSError as error:
                    self._not_written(path, file, error)

    def save(self) -> None:
        """Now."""
        for path, file in self._files:
            try:
                replace_file(path, file.dump())
            except OSError as error:
                self._not_written(path, file, error)

    def _not_written(self, path: Path, file: Kept, error: OSError) -> None:
        if path not in self._complained:
            self._complained.add(path)
            self._say("warning", f"{path} cannot be written ({error.strerror or error}): {file.lost}")
