"""The channel between a node and its children, and their ends."""

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import trio

from verifiers.codec import MAX_FRAME, FrameError, pack
from verifiers.process import Channel, Child, FrameStream, spawn

ROOT = str(Path(__file__).parents[2])


def frame(value: object) -> bytes:
    data = pack(value)
    return struct.pack(">I", len(data)) + data


@contextmanager
def connected() -> Iterator[tuple[FrameStream, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield FrameStream(trio.SocketStream(trio.socket.from_stdlib_socket(ours))), theirs


async def test_a_cancelled_receive_loses_nothing() -> None:
    with connected() as (frames, other):
        sent = frame(["first", "x" * 1000]) + frame("second")
        for piece in (sent[:2], sent[2:500]):
            other.sendall(piece)
            with trio.move_on_after(0.05) as scope:
                await frames.receive()
            assert scope.cancelled_caught
        other.sendall(sent[500:])
        assert await frames.receive() == ["first", "x" * 1000]
        assert await frames.receive() == "second"


@pytest.mark.parametrize("sent", [struct.pack(">I", MAX_FRAME + 1), b"\xff" * 4096, b"\0\0\0\1\xc1", b"\0\0\0\0"])
async def test_what_is_not_a_frame_is_refused_before_it_is_read(sent: bytes) -> None:
    with connected() as (frames, other):
        other.sendall(sent)
        with pytest.raises(FrameError):
            await frames.receive()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        with pytest.raises(FrameError):
            Channel(ours).receive()


async def test_a_frame_that_the_end_cuts_off_is_no_frame() -> None:
    with connected() as (frames, other):
        other.sendall(frame("whole")[:-1])
        other.close()
        with pytest.raises(EOFError):
            await frames.receive()


Start = Callable[[str], Child]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a child that runs the given code, with `channel` open and a `sleeper` process of its own."""

    def started(code: str) -> Child:
        (tmp_path / "childish.py").write_text(_CHILD + code)
        return spawn("childish", env={"PYTHONPATH": os.pathsep.join([str(tmp_path), ROOT])})

    return started


_CHILD = """
import subprocess, sys, time
from verifiers.process import Channel, die_with_parent
die_with_parent()
channel = Channel.inherited()
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
channel.send(sleeper.pid)
"""


async def test_kill_ends_the_child_and_what_it_started(start: Start) -> None:
    child = start("time.sleep(600)")
    sleeper = psutil.Process(await child.frames.receive())
    assert child.running
    assert await child.kill() == -signal.SIGKILL
    assert not psutil.pid_exists(child.pid)
    sleeper.wait(timeout=30)


async def test_what_a_child_left_behind_ends_too_though_the_child_had_ended_itself(start: Start) -> None:
    child = start("sys.exit(3)")
    sleeper = psutil.Process(await child.frames.receive())
    while child.running:
        await trio.sleep(0.01)
    child.signal(signal.SIGTERM)
    assert sleeper.is_running()
    assert await child.kill() == 3
    sleeper.wait(timeout=30)


async def test_a_number_that_may_be_anothers_by_now_is_not_signalled(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start("sys.exit(4)")
    sleeper = psutil.Process(await child.frames.receive())
    assert await child.wait() == 4
    sleeper.wait(timeout=30)
    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, lambda *_: pytest.fail("signalled a process that was reaped"))
    child.signal(signal.SIGTERM)
    assert await child.kill() == 4


_PARENT = """
import sys, trio
from verifiers.process import spawn

async def main():
    child = spawn("childish", env={"PYTHONPATH": sys.argv[1]})
    print(child.pid, await child.frames.receive(), flush=True)
    await trio.sleep_forever()

trio.run(main)
"""


def test_a_busy_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "childish.py").write_text(_CHILD + "while True: pass")
    command = [sys.executable, "-c", _PARENT, os.pathsep.join([str(tmp_path), ROOT])]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert parent.stdout is not None
        child, sleeper = map(psutil.Process, map(int, parent.stdout.readline().split()))
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()
    try:
        child.wait(timeout=30)
    finally:
        sleeper.kill()
