"""Small files that must be whole after a crash."""

import os
import re
import tempfile
from pathlib import Path

_RANDOM = r"[a-z0-9_]{8}"
"""What `tempfile` puts at the end of a name."""


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace `path` by `data`: a crash of the process leaves the old file or the new one, and perhaps a temporary file
    for `sweep`.

    Raises OSError, with nothing left behind.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def sweep(path: Path) -> None:
    """Remove what killed writers of `path` have left, for its only writer before it writes. Raises OSError."""
    left = re.compile(re.escape(f".{path.name}.") + _RANDOM)
    for other in path.parent.iterdir():
        if left.fullmatch(other.name):
            other.unlink(missing_ok=True)


def set_aside(path: Path) -> Path:
    """Rename a file that cannot be read to `<name>.damaged`, over an earlier one. Raises OSError."""
    aside = path.with_name(f"{path.name}.damaged")
    os.replace(path, aside)
    return aside
