"""Which files a verifier needs, and leave to use those alone (Landlock).

Leave is given for whole folders, so what must stay out of reach although it lies in one of them (a data directory in a
checkout, say) is left out by giving leave for what is beside it instead.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SYSTEM = (
    *("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/usr", "/nix/store", "/snap", "/gnu/store"),
    *("/proc/cpuinfo", "/proc/filesystems", "/proc/meminfo", "/proc/stat", "/sys/devices/system"),
)
"""Folders of programs and libraries, and what these ask of the processor."""

_SETTINGS = (
    *("alternatives", "bash.bashrc", "ca-certificates", "crypto-policies", "environment", "fonts", "gai.conf", "group"),
    *("host.conf", "hosts", "inputrc", "java-17-openjdk", "java-21-openjdk", "ld.so.cache", "ld.so.conf"),
    *("ld.so.conf.d", "locale.alias", "locale.conf", "localtime", "login.defs", "magic", "matplotlibrc", "mime.types"),
    *("nsswitch.conf", "OpenCL", "openmpi", "os-release", "passwd", "pki", "profile", "protocols", "python3", "R"),
    *("resolv.conf", "services", "ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone", "vulkan"),
)
"""What programs read in /etc. Not all of it: a node of root would give away the machine's secrets."""

SETTINGS = tuple(f"/etc/{name}" for name in _SETTINGS)

DEVICES = ("/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")

_SECRETS = (
    *(".aws", ".azure", ".bash_history", ".config", ".docker", ".git-credentials", ".gnupg", ".kube", ".netrc"),
    *(".npmrc", ".password-store", ".pypirc", ".ssh", ".cache/huggingface/token", ".cache/huggingface/stored_tokens"),
    *(".local/share/keyrings",),
)


def secrets() -> list[Path]:
    """Where people keep keys. No leave for a folder above includes them."""
    home = Path.home()
    return [home / name for name in _SECRETS]


def interpreter() -> list[str]:
    """All that this Python imports from, and the libraries that it loads."""
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path, *libraries, *_editable()}
    return sorted(path for path in found if os.path.isabs(path) and os.path.exists(path))


def _editable() -> Iterator[str]:
    """Source folders of packages that setuptools installed as editable: its finders know them, `sys.path` does not."""
    for finder in sys.meta_path:
        module = sys.modules.get(getattr(finder, "__module__", ""))
        mapping = getattr(module, "MAPPING", None)
        if isinstance(mapping, dict):
            yield from (path for path in mapping.values() if isinstance(path, str))


def named(config: Mapping[str, Any]) -> list[str]:
    """The files and folders that a configuration of this node's owner names in full."""
    found: list[str] = []
    waiting: list[Any] = [*config.values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            path = os.path.expanduser(value)
            if os.path.isabs(path) and "\0" not in path and os.path.exists(path):
                found.append(path)
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    return found


def belongings(argv: Sequence[str], path: str) -> list[str]:
    """What a program of these arguments is made of: the folder of each file named, of an interpreter its environment.

    `path` is where programs are looked for. Never a person's home as a whole, nor anything above it: of a file that
    lies right there, the file alone.
    """
    found: set[Path] = set()
    for number, argument in enumerate(argv):
        place: str | None = argument if os.sep in argument or os.path.exists(argument) else None
        if place is None:
            place = shutil.which(argument, path=path) if number == 0 or "=" in argv[number - 1] else None
        if place is None or not os.path.exists(place):
            continue
        file = Path(os.path.abspath(place))
        for each in {file, file.resolve()}:
            found.add(each)
            # bin/python and bin/node need the folder above, with lib and the like.
            folder = each if each.is_dir() else each.parent.parent if each.parent.name == "bin" else each.parent
            found.update([folder, *_linked(folder)])
    return sorted(str(each) for each in found if each.is_file() or not _too_much(each))


def _linked(environment: Path) -> Iterator[Path]:
    """What a virtual environment of Python imports from elsewhere: sources that are installed as editable."""
    if (environment / "pyvenv.cfg").is_file():
        for file in environment.glob("lib/python*/site-packages/*.pth"):
            for line in file.read_text(errors="replace").splitlines():
                if os.path.isabs(line) and os.path.isdir(line):
                    yield Path(line).resolve()


def _too_much(folder: Path) -> bool:
    home = Path.home()
    return folder == home or folder in home.parents or len(folder.parts) <= 1


def carve(folders: Iterable[str], private: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """(what may be read whole, folders that may only be listed), so that nothing at or below `private` is in the first.

    What lies inside a private folder and is named itself stays: somebody has named it.
    """
    hidden = [path.resolve() for path in private]
    whole: list[Path] = []
    listed: list[Path] = []
    waiting = [Path(folder).resolve() for folder in folders]
    while waiting:
        folder = waiting.pop()
        inside = [path for path in hidden if path == folder or folder in path.parents]
        if not inside:
            whole.append(folder)
        elif folder not in inside and folder.is_dir():
            listed.append(folder)
            waiting += folder.iterdir()
    return whole, listed


def restrict(read: Iterable[Path], listed: Iterable[Path], write: Iterable[str], *, network: bool) -> bool:
    """Leave this process, and what it starts, the use of these files and folders alone, for good.

    `read` may be executed too. Where the kernel knows how, it also takes away TCP (unless `network`), signals to
    others and their abstract sockets. Returns False where the kernel has no Landlock.
    """
    import landlockpy
    from landlockpy import AccessFS, AccessNet, Scope

    reading = AccessFS.READ_FILE | AccessFS.READ_DIR | AccessFS.EXECUTE
    one_file = AccessFS.READ_FILE | AccessFS.WRITE_FILE | AccessFS.EXECUTE | AccessFS.TRUNCATE | AccessFS.IOCTL_DEV
    everything = AccessFS(sum(AccessFS))
    leaves = [
        *((path, reading) for path in read),
        *((path, AccessFS.READ_DIR) for path in listed),
        *((Path(path), everything) for path in write),
    ]
    try:
        with landlockpy.Ruleset(
            handled_net=AccessNet.NONE if network else None, scoped=Scope.ABSTRACT_UNIX_SOCKET | Scope.SIGNAL
        ) as ruleset:
            for path, access in leaves:
                try:
                    ruleset.allow_path(path, access if path.is_dir() else access & one_file)
                except (FileNotFoundError, PermissionError):
                    continue
            ruleset.restrict()
    except landlockpy.LandlockError:
        return False
    return True
