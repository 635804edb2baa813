"""Child processes of a node: one bounded codec, frames over an inherited socket, and a child that dies with its parent.

Both kinds of child (the learner and the verifier sandbox) use this. A frame is a big-endian 32-bit length and that many
bytes of msgpack. Either side may hold hostile text, so the length is checked before anything is read, and nothing
nested deeper than msgpack's own limit is decoded.
"""

import contextlib
import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgpack
import trio

MAX_FRAME = 64 * 2**20
"""Bytes in one frame. A round's groups take some hundred kilobytes; this leaves room and still bounds memory."""

_HEADER = struct.Struct(">I")
_FD_VARIABLE = "SWARMNODE_CHANNEL_FD"


class FrameError(Exception):
    """The other side sent bytes that are not a frame; nothing after them can be trusted."""


def pack(value: Any) -> bytes:
    """`value` as msgpack. Raises FrameError if it holds a type that msgpack does not, or is too long for a frame."""
    try:
        data = msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"cannot be packed: {error}") from error
    if len(data) > MAX_FRAME:
        raise FrameError(f"{len(data)} bytes do not fit a frame of {MAX_FRAME}")
    return bytes(data)


def unpack(data: bytes) -> Any:
    """The value in `data`, all of it. Raises FrameError for anything else than one well-formed value."""
    if len(data) > MAX_FRAME:
        raise FrameError(f"a frame of {len(data)} bytes, {MAX_FRAME} are allowed")
    try:
        value = msgpack.unpackb(data, strict_map_key=False)
    # msgpack raises ValueError (and its subclasses) for bad bytes, and UnicodeDecodeError is one of those too.
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise FrameError(f"not msgpack: {error}") from error
    return value


class Channel:
    """The child's end: blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def inherited(cls) -> "Channel":
        """The channel that `spawn` left open for this process. Raises RuntimeError if it was started by hand."""
        number = os.environ.pop(_FD_VARIABLE, None)
        if number is None:
            raise RuntimeError("this program is started by swarmnode, not by hand")
        return cls(socket.socket(fileno=int(number)))

    def send(self, value: Any) -> None:
        """Send one frame. Raises OSError if the parent is gone."""
        data = pack(value)
        self._socket.sendall(_HEADER.pack(len(data)) + data)

    def receive(self) -> Any:
        """The next frame. Raises EOFError when the parent has closed the channel."""
        (length,) = _HEADER.unpack(self._exactly(_HEADER.size))
        if length > MAX_FRAME:
            raise FrameError(f"a frame of {length} bytes, {MAX_FRAME} are allowed")
        return unpack(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._socket.recv(min(count - len(data), 2**20))
            if not piece:
                raise EOFError("the parent closed the channel")
            data += piece
        return bytes(data)


class FrameStream:
    """The parent's end, under trio. A cancelled `receive` loses nothing: what had come stays buffered."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def send(self, value: Any) -> None:
        """Send one frame. Raises trio.BrokenResourceError if the child is gone.

        A frame cut short by a cancellation would garble all that follow, so the caller must not use the stream after
        cancelling a send; `Child.kill` is what is left.
        """
        data = pack(value)
        await self._stream.send_all(_HEADER.pack(len(data)) + data)

    async def receive(self) -> Any:
        """The next frame. Raises EOFError when the child has closed its end, FrameError if it sent something else."""
        await self._fill(_HEADER.size)
        (length,) = _HEADER.unpack(self._buffer[: _HEADER.size])
        if length > MAX_FRAME:
            raise FrameError(f"a frame of {length} bytes, {MAX_FRAME} are allowed")
        await self._fill(_HEADER.size + length)
        data = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
        del self._buffer[: _HEADER.size + length]
        return unpack(data)

    async def aclose(self) -> None:
        """Close the channel; the child sees the end of it and goes."""
        await self._stream.aclose()

    async def _fill(self, count: int) -> None:
        while len(self._buffer) < count:
            try:
                piece = await self._stream.receive_some(2**16)
            except trio.BrokenResourceError as error:
                raise EOFError("the child is gone") from error
            if not piece:
                raise EOFError("the child closed the channel")
            self._buffer += piece


class Child:
    """A child process in a session of its own (a Ctrl-C at the terminal is the parent's alone) and its channel."""

    def __init__(self, process: subprocess.Popen[bytes], frames: FrameStream) -> None:
        self.process = process
        self.frames = frames

    @property
    def pid(self) -> int:
        """Process id, which is its process group's id too."""
        return self.process.pid

    def signal(self, number: int) -> None:
        """Send a signal to the child alone; nothing happens if it has already ended."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    async def kill(self) -> int:
        """End the child and everything it started, and reap it. Returns its exit status."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with trio.CancelScope(shield=True):
            await self.frames.aclose()
            await self.wait()
        return self.process.wait()

    async def wait(self) -> int:
        """Wait until the child has ended. Returns its exit status, negative for a signal."""
        pause = 0.001
        while (status := self.process.poll()) is None:
            await trio.sleep(pause)
            pause = min(2 * pause, 0.1)
        return status


def spawn(
    module: str,
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    stderr: int | None = None,
) -> Child:
    """Start `python -m module` with a channel to it. `env` is its whole environment.

    Synchronous on purpose: Linux ends a child of `PR_SET_PDEATHSIG` when the *thread* that started it ends, so the
    main thread has to. Raises OSError if the system cannot start a process.
    """
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            env={**env, _FD_VARIABLE: str(theirs.fileno())},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return Child(process, FrameStream(trio.SocketStream(trio.socket.from_stdlib_socket(ours))))


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Called by a child first of all: when its parent is gone, so are it and everything it started.

    On Linux the kernel sees to it. Elsewhere a thread looks every half second, which a call that never gives up the
    interpreter lock can delay.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    threading.Thread(target=_watch, args=(parent,), daemon=True, name="watch-parent").start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)
