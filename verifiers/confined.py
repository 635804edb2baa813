"""Starts a program of the verifier `command` with no more than it needs.

`python -I confined.py POLICY PROGRAM ARGUMENT...`, started by the node, confines itself as POLICY (JSON, a `Policy`)
says and becomes the program. Where namespaces are to be had it stays as the program's parent, ends with it and hands on
its exit status. What the system does not offer is left out, and what was done is written to `report` as JSON.
"""

import glob
import json
import os
import select
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    # -I leaves the folder of this project out, wherever it was imported from.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from verifiers import access, namespaces, seccomp
from verifiers.isolation import give_up_privileges, killed_first, limit
from verifiers.launch import end_with_parent, start

_KEPT = ("/proc", "/sys/fs/cgroup", "/sys/class", "/sys/bus", "/sys/kernel/mm")
"""Read by programs beyond what a worker needs. Of processes that are not its own Landlock shows it nothing private."""

_GPU = ("/dev/nvidia*", "/dev/nvidia-caps/*", "/dev/dri/*", "/dev/kfd")
"""Patterns. Not all of /dev: the disks of a node of root are there too."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a program may do, in terms of the system."""

    parent: int
    report: int
    """A descriptor for the report, closed before the program runs."""
    scratch: str
    """An empty folder of its own, its place for temporary files."""
    read: list[str]
    write: list[str]
    private: list[str]
    network: bool
    devices: bool
    memory_mb: int
    """For each of its processes."""
    disk_mb: int
    """Size of `scratch`, and of any one file."""

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def main(policy: Policy, argv: list[str]) -> NoReturn:
    """Confine this process and become the program. Exits with a message if the program cannot be started."""
    end_with_parent()
    if os.getppid() != policy.parent:
        sys.exit("the process that started this one is gone")
    killed_first()
    own = namespaces.possible(policy.network)
    got = {"network": policy.network or own, "disk": own, "processes": own}
    if own:
        namespaces.enter(policy.network)
        _become_first()
        namespaces.mounts(Path(policy.scratch), policy.write, policy.disk_mb)
        bounded = namespaces.processes()
        # The kernel counts for an ordinary user only.
        got["processes"] = bounded or (limit("RLIMIT_NPROC", namespaces.MAX_PROCESSES) and os.getuid() != 0)
    _limit(policy, got)
    os.write(policy.report, json.dumps(got).encode())
    os.close(policy.report)
    start(argv)


def _become_first() -> None:
    """Go on as a child, the first process of the new system, that ends when this one does. This one waits for it."""
    held, ours = os.pipe()
    child = os.fork()
    if child:
        os.close(held)
        for number in (0, 1, 2):
            os.close(number)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
    os.close(ours)
    end_with_parent()
    poll = select.poll()
    poll.register(held, select.POLLHUP)
    if poll.poll(0):
        sys.exit("the process that started this one is gone")
    os.close(held)
    # What Python ignores or handles for itself is the program's own affair.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _limit(policy: Policy, got: dict[str, bool]) -> None:
    """Limits, rights, files and system calls, in an order in which each can still be set."""
    limited = [limit("RLIMIT_DATA", policy.memory_mb * 2**20), limit("RLIMIT_FSIZE", policy.disk_mb * 2**20)]
    got["memory"] = all(limited) and limit("RLIMIT_CORE", 0)
    if sys.platform != "linux":
        got |= {"privileges": False, "files": False, "calls": False}
        return
    got["privileges"] = give_up_privileges()
    devices = [path for pattern in _GPU for path in glob.glob(pattern)] if policy.devices else []
    folders = [*access.SYSTEM, *access.SETTINGS, *_KEPT, *(["/sys"] if policy.devices else []), *policy.read]
    private = [Path(path) for path in policy.private]
    whole, listed = access.carve(folders, private)
    written, also_listed = access.carve(policy.write, private)
    listed += also_listed
    write = [*access.DEVICES, *devices, policy.scratch, *map(str, written), *(["/dev/shm"] if got["disk"] else [])]
    got["files"] = access.restrict(whole, listed, write, network=policy.network)
    got["calls"] = seccomp.restrict(seccomp.program(policy.network))
    got["network"] = got["network"] or got["calls"]


if __name__ == "__main__":
    main(Policy(**json.loads(sys.argv[1])), sys.argv[2:])
