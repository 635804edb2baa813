"""What a sandbox process gives up before it meets the first answer."""

import ctypes
import os
import resource
import sys
from collections.abc import Mapping

OUT_OF_MEMORY = 77
"""Exit status of a worker in which an answer or a task took more than the memory limit."""

_CLONE_NEWNET = 0x40000000
_CLONE_NEWUSER = 0x10000000
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38

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


def isolate(memory_mb: int) -> dict[str, bool]:
    """Limit this process for good. Returns what the system allowed, by name; nothing here is fatal.

    To be called before the process has a second thread: the kernel moves only a lone thread to a new user namespace.
    """
    got = {"network": False, "privileges": False, "memory": _limit("RLIMIT_AS", memory_mb * 2**20)}
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        # As an ordinary user a new network takes a new user namespace; some systems forbid those but let root have
        # the network alone.
        got["network"] = libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0 or libc.unshare(_CLONE_NEWNET) == 0
        got["privileges"] = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    written, cores, files = _limit("RLIMIT_FSIZE", 0), _limit("RLIMIT_CORE", 0), _limit("RLIMIT_NOFILE", _MAX_FILES)
    got["files"] = written and cores and files
    return got


def _limit(name: str, value: int) -> bool:
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
