"""Ends a process with the process that started it, and starts other programs so that they end with it too.

`python launch.py PID PROGRAM ARGUMENT...`, started by the process with that id, becomes the program. It runs before
anything else is set up, so it imports nothing but the standard library.
"""

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel end this process when the thread that started it ends. Does something on Linux only.

    The promise survives an exec of an ordinary program and is forgotten in a fork: it holds for this process alone.
    Raises OSError if the kernel refuses.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def main(parent: int, argv: list[str]) -> NoReturn:
    """Become the program `argv`, found on the PATH, unless the parent has gone already."""
    end_with_parent()
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")
    start(argv)


def start(argv: list[str]) -> NoReturn:
    """Become the program `argv`, found on the PATH; exit with a message if that cannot be."""
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"{argv[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
