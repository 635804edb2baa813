"""A full disk is waited for; anything else that goes wrong with a write is not."""

import errno
import os
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from node.disk import Disk, DiskFullError, is_disk_full
from node.stop import Stop

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Said:
    """What the operator was told."""

    def __init__(self) -> None:
        self.levels: list[str] = []
        self.texts: list[str] = []

    def __call__(self, level: str, text: str) -> None:
        self.levels.append(level)
        self.texts.append(text)


def failing(times: int, error: Exception) -> Callable[[], Awaitable[int]]:
    """A write that fails so many times, and then returns how often it was tried."""
    tries = 0

    async def write() -> int:
        nonlocal tries
        tries += 1
        await trio.lowlevel.checkpoint()
        if tries <= times:
            raise error
        return tries

    return write


def sqlite_full(path: Path) -> sqlite3.Error:
    """What SQLite itself says when its file may not grow."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("CREATE TABLE t (x BLOB)")
        connection.execute("PRAGMA max_page_count = 3")
        with pytest.raises(sqlite3.OperationalError) as caught:
            connection.execute("INSERT INTO t VALUES (zeroblob(100000))")
        return caught.value
    finally:
        connection.close()


def test_a_full_disk_is_told_from_other_errors(tmp_path: Path) -> None:
    assert is_disk_full(FULL)
    assert is_disk_full(OSError(errno.EDQUOT, "quota"))
    assert is_disk_full(sqlite_full(tmp_path / "full"))
    assert not is_disk_full(PermissionError(errno.EACCES, "no"))
    connection = sqlite3.connect(":memory:")
    with pytest.raises(sqlite3.OperationalError) as caught:
        connection.execute("SELECT * FROM nowhere")
    connection.close()
    assert not is_disk_full(caught.value)


async def test_a_write_is_tried_until_there_is_room(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    say = Said()
    assert await Disk(tmp_path, 0, Stop(), say).write("the pool", failing(3, FULL)) == 4
    assert say.levels == ["error", "info"], "one word when it pauses, one when it goes on"
    assert "the pool" in say.texts[0]
    assert str(tmp_path) in say.texts[0]


async def test_another_error_is_not_waited_for(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    say = Said()
    with pytest.raises(PermissionError):
        await Disk(tmp_path, 0, Stop(), say).write("the pool", failing(1, PermissionError(errno.EACCES, "no")))
    assert say.levels == []


async def test_a_node_that_waits_for_room_can_be_stopped(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    stop = Stop()
    disk = Disk(tmp_path, 0, stop, Said())

    async def stop_later() -> None:
        await trio.sleep(60)
        stop.request()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop_later)
        with pytest.raises(DiskFullError, match="the pool is not written"):
            await disk.write("the pool", failing(10**6, FULL))
    # Once told to stop, it still gives a write one try: that is how a checkpoint is saved at the end.
    assert await disk.write("the checkpoint", failing(0, FULL)) == 1
    with pytest.raises(DiskFullError, match="the checkpoint is not written"):
        await disk.write("the checkpoint", failing(1, FULL))


async def test_training_waits_for_room_until_told_to_stop(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    say, stop = Said(), Stop()
    await Disk(tmp_path, 0, stop, say).wait_for_room()
    assert say.levels == []
    disk = Disk(tmp_path, 2**60, stop, say)
    with trio.move_on_after(600) as scope:
        await disk.wait_for_room()
    assert scope.cancelled_caught
    stop.request()
    await disk.wait_for_room()
    assert "info" not in say.levels
    assert str(2**60) in say.texts[0]
