"""A node whose clock can be set wrong while it runs: `python -m bench.chaos.clock FILE ARGUMENT...`.

FILE holds one number, by how many seconds `time.time` is ahead; whoever writes it moves the clock. The rest is the
command line of `swarmnode`. Only what Python code reads from `time` is wrong, in the node process alone: kernel and C
libraries know the true time, and nothing of the product takes part.
"""

import mmap
import struct
import sys
import time
from pathlib import Path

_NUMBER = struct.Struct("<d")


def write_offset(path: Path, seconds: float) -> None:
    """Set the clock of the node that has this file `seconds` ahead of the true one."""
    if not path.exists():
        path.write_bytes(bytes(_NUMBER.size))
    with path.open("r+b") as file:
        file.write(_NUMBER.pack(seconds))


def shift(path: Path) -> None:
    """Have `time.time` and `time.time_ns` of this process follow the file."""
    with path.open("rb") as file:
        offset = mmap.mmap(file.fileno(), _NUMBER.size, access=mmap.ACCESS_READ)
    true, true_ns = time.time, time.time_ns

    def shifted() -> float:
        return true() + float(_NUMBER.unpack_from(offset)[0])

    def shifted_ns() -> int:
        return true_ns() + int(1e9 * _NUMBER.unpack_from(offset)[0])

    time.time, time.time_ns = shifted, shifted_ns


def main() -> None:
    """Shift the clock, then be `swarmnode`."""
    shift(Path(sys.argv[1]))
    # Only now: others take `time.time` for their own when they are imported.
    from node.cli import main as swarmnode

    sys.argv = ["swarmnode", *sys.argv[2:]]
    swarmnode()


if __name__ == "__main__":
    main()
