"""What several targets use: a directory for files that are read by path, and frames that come from nowhere."""

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from p2p.transport import FrameTooLong, TransportError
from verifiers.codec import FrameError, pack, unpack


def directory() -> Path:
    """An empty directory that goes with the process."""
    path = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def cut(data: bytes) -> Iterator[bytes]:
    """The pieces that `joined` put together."""
    while data:
        length = int.from_bytes(data[:2], "big")
        yield data[2 : 2 + length]
        data = data[2 + length :]


def joined(pieces: Sequence[bytes]) -> bytes:
    """Pieces with their lengths, two bytes each."""
    return b"".join(len(piece).to_bytes(2, "big") + piece for piece in pieces)


class Stream:
    """A `p2p.transport.Stream` on which these frames come, and then its end. `sent` counts bytes."""

    def __init__(self, frames: Iterator[bytes], peer: str) -> None:
        self.peer = peer
        self.sent = 0
        self._frames = frames

    async def send(self, frame: bytes) -> None:
        """Swallow it."""
        self.sent += len(frame)

    async def receive(self, limit: int) -> bytes:
        """The next one."""
        frame = next(self._frames, None)
        if frame is None:
            raise TransportError("the end")
        if len(frame) > limit:
            raise FrameTooLong("longer than allowed")
        return frame


class Child:
    """A `verifiers.process.Child` that says these values whatever it is told, and then ends."""

    pid, running, pending = 0, True, False

    def __init__(self, data: bytes) -> None:
        self.frames = self
        self._pieces = cut(data)

    async def send(self, value: Any) -> None:
        """Swallow it. Raises FrameError as the real one does."""
        pack(value)

    async def receive(self) -> Any:
        """The next one. Raises EOFError, FrameError."""
        piece = next(self._pieces, None)
        if piece is None:
            raise EOFError("the child closed the channel")
        return unpack(piece)

    def signal(self, number: int) -> None:
        """It does not care."""

    async def kill(self) -> int:
        """Its exit status."""
        return -9


__all__ = ["Child", "FrameError", "Stream", "cut", "directory", "joined"]
