"""A system of its own for a program: its processes, network, shared memory and mounts (Linux namespaces, without root).

Inside, the program is the first process, so all that it started ends with it. It sees no process but its own, every
file system is read-only, and it writes to a file system in memory that has a size and is gone when it ends.

Sources: user_namespaces(7), pid_namespaces(7), mount_setattr(2), tmpfs(5).
"""

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path

MAX_PROCESSES = 512
"""Processes and threads of one program. The kernel reserves the first 300 numbers, which bounds it from below."""

_MAX_ENTRIES = 100_000
"""Files and folders in the file system in memory: each takes about a kilobyte that its size does not count."""

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18

_SYS_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY = 1


def possible(network: bool) -> bool:
    """Whether this system gives a process all of it: found out by a child, since half of it would be in the way."""
    if sys.platform != "linux":
        return False
    child = os.fork()
    if child == 0:
        try:
            enter(network)
            _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
            _mount_memory(Path("/"), 1, "700")
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def enter(network: bool) -> None:
    """Move this process to new namespaces; the next process it starts is the first in its own. Raises OSError.

    `network`: keep the network. The user stays who it is, and has no rights outside any more.
    """
    user, group = os.geteuid(), os.getegid()
    kinds = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC
    _call("unshare", kinds | (0 if network else _CLONE_NEWNET))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def mounts(scratch: Path, writable: Iterable[str], disk_mb: int) -> None:
    """Make all files read-only but those below `writable`, and mount the file system in memory at `scratch`.

    To be called by the first process. Raises OSError.
    """
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    kept = [os.fsencode(path) for path in writable]
    for path in kept:
        _call("mount", path, path, None, _MS_BIND | _MS_REC, None)
    _read_only(b"/", True)
    for path in kept:
        _read_only(path, False)
    _mount_memory(scratch, disk_mb, "700")
    if os.path.isdir("/dev/shm"):
        # Python's own multiprocessing keeps its locks there.
        _mount_memory(Path("/dev/shm"), disk_mb, "1777")


def processes() -> bool:
    """Show this system's processes in /proc, and bound their number. Returns whether the number is bounded for root.

    To be called by the first process. Both are refused in many containers, and the number on kernels before 6.14.
    """
    try:
        _call("mount", b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)
        Path("/proc/sys/kernel/pid_max").write_text(str(MAX_PROCESSES))
    except OSError:
        return False
    # An older kernel has one number for all; writing it from here fails, or has done nothing.
    return int(Path("/proc/sys/kernel/pid_max").read_text()) == MAX_PROCESSES


def _mount_memory(place: Path, size_mb: int, mode: str) -> None:
    options = f"size={size_mb}m,nr_inodes={_MAX_ENTRIES},mode={mode}".encode()
    _call("mount", b"scratch", os.fsencode(place), b"tmpfs", _MS_NOSUID | _MS_NODEV, options)


def _read_only(place: bytes, on: bool) -> None:
    """For the mount at `place` and all below."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY if on else 0, 0 if on else _MOUNT_ATTR_RDONLY, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, place, _AT_RECURSIVE, attributes, size)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
