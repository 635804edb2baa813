"""Child processes of a node: frames over an inherited socket, and a child that dies with its parent.

Both kinds of child (the learner and the verifier sandbox) use this. A frame is a big-endian 32-bit length and that many
bytes of msgpack (`verifiers.codec`). Either side may hold hostile text, so the length is checked before anything is
read.
"""

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import psutil
import trio

from verifiers import launch
from verifiers.codec import MAX_FRAME, FrameError, pack, unpack

_HEADER = struct.Struct(">I")
_FD_VARIABLE = "SWARMNODE_CHANNEL_FD"
_PARENT_VARIABLE = "SWARMNODE_PARENT_PID"


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

    @property
    def pending(self) -> bool:
        """Whether the child, which lives, has sent something that was not received yet."""
        return bool(self._buffer) or readable(self._stream.socket.fileno())

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


def readable(descriptor: int) -> bool:
    """Whether something can be read from it now, from a process that has its end still open."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return any(event & select.POLLIN and not event & select.POLLHUP for _, event in poll.poll(0))


class Group:
    """A process that leads a session of its own (a Ctrl-C at the terminal is the parent's alone), and what it started.

    The leader is reaped here and nowhere else, after its group was ended: until then its number, which is the group's
    too, cannot come to be that of a stranger.
    """

    def __init__(self, process: subprocess.Popen[bytes], tidy: float = 0.0) -> None:
        """`tidy`: seconds that what the leader started gets, once it has gone, to end by itself before it is ended."""
        self._process = process
        self._tidy = tidy

    @property
    def pid(self) -> int:
        """Process id, which is its process group's id too."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the leader has not ended yet."""
        if self._process.returncode is not None:
            return False
        try:
            return psutil.Process(self.pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return False

    def signal(self, number: int) -> None:
        """Send a signal to the leader alone; nothing happens if it has already ended."""
        if self.running:
            os.kill(self.pid, number)

    async def kill(self) -> int:
        """End the leader and everything in its group, and reap it. Returns its exit status."""
        self._kill_leader()
        with trio.CancelScope(shield=True):
            await self.wait()
        return self._process.wait()

    async def wait(self) -> int:
        """Wait until the leader has ended, then end what it left. Returns its exit status, negative for a signal."""
        pause = 0.001
        while self.running:
            await trio.sleep(pause)
            pause = min(2 * pause, 0.1)
        if self._tidy and self._process.returncode is None:
            with trio.move_on_after(self._tidy):
                while self._others():
                    await trio.sleep(0.05)
        self._kill_group()
        return self._process.wait()

    def _others(self) -> bool:
        """Whether anything but the leader is left in the group."""
        for number in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if number != self.pid and os.getpgid(number) == self.pid:
                    return True
        return False

    def _kill_leader(self) -> None:
        """End the leader at once, and all of its group where nothing is to be tidied up."""
        if not self._tidy:
            self._kill_group()
        elif self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)

    def _kill_group(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class Child(Group):
    """A child process of this project and its channel."""

    def __init__(self, process: subprocess.Popen[bytes], frames: FrameStream, tidy: float = 0.0) -> None:
        super().__init__(process, tidy)
        self.frames = frames

    async def kill(self) -> int:
        """Close the channel too."""
        self._kill_leader()
        with trio.CancelScope(shield=True):
            await self.frames.aclose()
        return await super().kill()


def spawn(
    module: str,
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    stderr: int | None = None,
    tidy: float = 0.0,
) -> Child:
    """Start `python -m module` with a channel to it. `env` is its whole environment, `tidy` as for `Group`.

    Synchronous on purpose: Linux ends a child of `PR_SET_PDEATHSIG` when the *thread* that started it ends, so the
    main thread has to. Raises OSError if the system cannot start a process.
    """
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            # By way of the launcher, so that not even a parent that dies while the child imports leaves it behind.
            [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), sys.executable, "-m", module],
            env={**env, _FD_VARIABLE: str(theirs.fileno()), _PARENT_VARIABLE: str(os.getpid())},
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
    return Child(process, FrameStream(trio.SocketStream(trio.socket.from_stdlib_socket(ours))), tidy)


def die_with_parent() -> None:
    """Called by a child first of all: when its parent is gone, so is it.

    On Linux `verifiers.launch` has seen to that already, whatever the child is doing; processes that it started itself
    have to see to themselves. Elsewhere a thread looks every half second and ends the whole group, which a call that
    never gives up the interpreter lock can delay.
    """
    parent = int(os.environ.pop(_PARENT_VARIABLE))
    if sys.platform != "linux":
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="watch-parent").start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)
