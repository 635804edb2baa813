"""What a sandbox process gives up before it meets the first answer."""

import contextlib
import ctypes
import os
import resource
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from verifiers import access, seccomp
from verifiers.launch import end_with_parent

OUT_OF_MEMORY = 77
"""Exit status of a worker in which an answer or a task took more than the memory limit."""

_CLONE_NEWNET = 0x40000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWIPC = 0x08000000
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION = 0x20080522

_MAX_FILES = 64
"""Open files: the modules and word lists being read, the channel, the terminal ends."""

_PASSED = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "SYSTEMROOT")
"""Variables of the node that Python may need to start at all; none of them holds a secret."""


def environment(node: Mapping[str, str], home: str, cache: str) -> dict[str, str]:
    """The whole environment of a sandbox process, given the node's, an empty directory and one that can be written.

    The second is for matplotlib, which a library of ReasoningGYM's imports and which insists on it.

    The fixed hash seed is not about safety: some data sets let the order of a set decide what they make.
    """
    kept = {name: node[name] for name in _PASSED if name in node}
    if "PYTHONPATH" in kept:
        kept["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in kept["PYTHONPATH"].split(os.pathsep))
    return {
        **kept,
        "HOME": home,
        "LANG": "C.UTF-8",
        "MPLCONFIGDIR": cache,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PATH": os.defpath,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONSAFEPATH": "1",
        "TZ": "UTC",
    }


def isolate(memory_mb: int, readable: Iterable[str], private: Iterable[str]) -> dict[str, bool]:
    """Limit this process for good. Returns what the system allowed, by name; nothing here is fatal.

    Of files it keeps what Python imports from and `readable`, but nothing below `private`. To be called before the
    process has a second thread: the kernel moves only a lone thread to a new user namespace, and filters that alone.
    """
    got = {"network": False, "privileges": False, "memory": limit("RLIMIT_AS", memory_mb * 2**20)}
    got |= {"secrets": False, "processes": False}
    written, cores, files = limit("RLIMIT_FSIZE", 0), limit("RLIMIT_CORE", 0), limit("RLIMIT_NOFILE", _MAX_FILES)
    got["files"] = written and cores and files
    if sys.platform == "linux":
        killed_first()
        libc = ctypes.CDLL(None, use_errno=True)
        # As an ordinary user a new network takes a new user namespace; some systems forbid those but let root have
        # the network alone.
        alone = _CLONE_NEWNET | _CLONE_NEWIPC
        got["network"] = libc.unshare(_CLONE_NEWUSER | alone) == 0 or libc.unshare(alone) == 0
        got["privileges"] = give_up_privileges()
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        # A change of credentials makes the kernel forget this one.
        end_with_parent()
        whole, listed = access.carve(
            [*access.SYSTEM, *access.SETTINGS, *access.interpreter(), *readable], map(Path, private)
        )
        got["secrets"] = access.restrict(whole, listed, access.DEVICES, network=False)
        got["processes"] = seccomp.restrict(seccomp.lone(os.getpid()))
        got["network"] = got["network"] or got["processes"]
    return got


def killed_first() -> None:
    """Have the kernel choose this process when memory runs out, and not the node. Never undone."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def give_up_privileges() -> bool:
    """Neither hold a capability nor gain a right by starting a program, for good. False if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    header, nothing = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    dropped = libc.capset(header, nothing) == 0
    return bool(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and dropped)


def limit(name: str, value: int) -> bool:
    """Set a limit of this process, soft and hard; a lower hard one stays. Returns whether the system took it."""
    kind = getattr(resource, name, None)
    if kind is None:
        return False
    try:
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    except (ValueError, OSError):
        return False
    return True
