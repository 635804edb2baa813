"""What the operator asks of a running node: pause, resume, save, stop. The rounds look at it between two rounds."""

import trio

from node.stop import Stop


class Control:
    """Wishes, set by the HTTP server and heeded by `node.rounds`. Nothing of it outlives the process."""

    def __init__(self, stop: Stop | None = None, done: int = 0) -> None:
        self._stop = stop or Stop()
        self._changed = trio.Event()
        self._save = False
        self.paused = False
        """Whether no further round is to begin."""
        self.resting = False
        """Whether the rounds have come to rest because of that."""
        self.saved = done
        """The last round of which there is a checkpoint."""
        self.done = done
        """The last finished round."""

    @property
    def stopping(self) -> bool:
        """Whether the node is on its way out."""
        return self._stop.requested

    def pause(self) -> None:
        """Finish the round in hand and begin no other."""
        self.paused = True
        self._wake()

    def resume(self) -> None:
        """Go on."""
        self.paused = False
        self._wake()

    def save(self) -> None:
        """Write a checkpoint as soon as the round in hand is done."""
        self._save = True
        self._wake()

    def stop(self) -> None:
        """End the node as SIGTERM does: the last finished round is saved."""
        self._stop.request()

    def take_save(self) -> bool:
        """Whether a checkpoint is wished for; the wish is then granted."""
        wanted, self._save = self._save, False
        return wanted

    async def rest(self) -> None:
        """Wait until there is another wish."""
        self.resting = True
        try:
            await self._changed.wait()
        finally:
            self.resting = False

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
