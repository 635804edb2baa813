"""Errors that are for the person at the keyboard."""

import errno

_ADVICE = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or ask for a larger quota",
    errno.EACCES: "change its owner or mode, or use another path",
    errno.EPERM: "change its owner or mode, or use another path",
    errno.EROFS: "use another path",
    errno.EEXIST: "move away what is there, or use another path",
    errno.EISDIR: "move away what is there, or use another path",
    errno.ENOTDIR: "move away the file that stands where a directory has to be, or use another path",
}


class NodeError(Exception):
    """Something the operator can put right. The message says what, and is printed without a traceback."""

    exit_status = 1


class ConfigError(NodeError):
    """A configuration that cannot be used. One line a mistake: key, value, what is allowed, where it stands."""

    exit_status = 2


def file_problem(error: OSError) -> str | None:
    """One line that names the path and says what to do; None if the error is about no file and no full disk."""
    if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    where = "" if error.filename is None else f"{error.filename}: "
    advice = _ADVICE.get(error.errno or 0)
    return f"{where}{error.strerror or error}" + (f"; {advice}" if advice else "")
