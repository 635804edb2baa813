"""What comes out of a child's socket."""

from typing import Any, cast

import trio

from verifiers.codec import FrameError, pack
from verifiers.process import FrameStream


def seeds() -> list[bytes]:
    values: list[Any] = [
        [1, "ok", ["1", "{}"]],
        {"id": 3, "ok": True, "result": [None, 1.5, b"x"]},
        [2, "reward", 0.5, "scored"],
    ]
    packed = [pack(value) for value in values]
    return [len(one).to_bytes(4, "big") + one for one in packed]


class _Socket:
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def receive_some(self, most: int) -> bytes:
        piece, self._data = self._data[:7], self._data[7:]
        return piece


def run(data: bytes) -> None:
    trio.run(_read, FrameStream(cast(trio.SocketStream, _Socket(data))))


async def _read(frames: FrameStream) -> None:
    while True:
        try:
            await frames.receive()
        except (EOFError, FrameError):
            return
