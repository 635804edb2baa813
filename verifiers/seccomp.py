"""Which system calls a verifier's process may make: a filter (seccomp-BPF) that the kernel runs at each of them.

Written here because no library fits: Python bindings of libseccomp that install as a wheel have had no release since
2021, need the system's libseccomp, which small images lack, and run a compiler to find it. What is needed of it is a
few dozen instructions. The filter names what is refused, since nobody can name all that the libraries of others call;
system calls that are newer than this table are refused as if the kernel were older.

Sources: seccomp(2), linux/filter.h, linux/seccomp.h; the numbers are those of asm/unistd_64.h (x86-64) and
asm-generic/unistd.h (arm64).
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""BPF: load a word, three conditional jumps, return."""

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's name of each, and its column in the table of numbers. Both are little-endian."""

_NEWEST = 469
"""The last number of this table's kernel (6.17). All above, the x32 calls of x86-64 too, are refused."""

_NUMBERS: dict[str, tuple[int | None, int]] = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "fanotify_init": (300, 262),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fcntl": (72, 25),
    "file_setattr": (469, 469),
    "fremovexattr": (199, 16),
    "fsconfig": (431, 431),
    "fsetxattr": (190, 7),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "kill": (62, 129),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "semget": (64, 190),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "shmget": (29, 194),
    "socket": (41, 198),
    "syslog": (103, 116),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "utimensat": (280, 88),
}
_X86_ONLY = {
    "chmod": 90,
    "chown": 92,
    "fork": 57,
    "futimesat": 261,
    "lchown": 94,
    "utime": 132,
    "utimes": 235,
    "vfork": 58,
}

_TRACING = (
    *("kcmp", "perf_event_open", "pidfd_getfd", "process_madvise", "process_mrelease"),
    *("process_vm_readv", "process_vm_writev", "ptrace"),
)
"""Looking into other processes, or changing them."""

_KERNEL = (
    *("add_key", "bpf", "fanotify_init", "io_uring_enter", "io_uring_register", "io_uring_setup", "keyctl"),
    *("open_by_handle_at", "request_key", "syslog", "userfaultfd"),
)
"""Ways round a filter, or parts of the kernel that have had many faults and that no scorer needs."""

_MOUNTS = (
    *("chroot", "fsconfig", "fsmount", "fsopen", "fspick", "mount", "mount_setattr", "move_mount", "open_tree"),
    *("open_tree_attr", "pivot_root", "setns", "umount2", "unshare"),
)

_LASTING = ("mq_open", "msgget", "semget", "shmget")
"""What outlives its process, and memory that no limit of a process counts."""

_ATTRIBUTES = (
    *("chmod", "chown", "fchmod", "fchmodat", "fchmodat2", "fchown", "fchownat", "file_setattr", "fremovexattr"),
    *("fsetxattr", "futimesat", "lchown", "lremovexattr", "lsetxattr", "removexattr", "removexattrat", "setxattr"),
    *("setxattrat", "utime", "utimensat", "utimes"),
)
"""Changes of files that Landlock does not know."""

_PROCESSES = ("clone", "execve", "execveat", "fork", "vfork")
_OTHERS = ("ioprio_set", "migrate_pages", "move_pages", "pidfd_open", "pidfd_send_signal", "setpriority")
_MEMORY_FILES = ("memfd_create", "memfd_secret")

_NEW_NAMESPACES = 0x7E020080
"""The flags of clone(2) that make a namespace."""

_PR_SET_PDEATHSIG = 1
_F_SETSIG, _F_SETOWN, _F_SETOWN_EX = 10, 8, 15
_FIOSETOWN, _SIOCSPGRP, _TIOCSTI, _TIOCLINUX = 0x8901, 0x8902, 0x5412, 0x541C
_AF_INET, _AF_INET6, _AF_NETLINK = 2, 10, 16


@dataclass(frozen=True, slots=True)
class Refused:
    """One system call that is refused: always, or depending on one of its arguments.

    `only`: unless the argument is one of `values`. `among`: if it is one of them. `flags`: if it has any bit of them.
    """

    call: str
    when: Literal["always", "only", "among", "flags"] = "always"
    argument: int = 0
    values: tuple[int, ...] = ()
    error: int = errno.EPERM


def lone(pid: int) -> list[Refused]:
    """For the process `pid` that stays alone: no thread or process, no socket, nothing done to others or to files."""
    calls = (*_TRACING, *_KERNEL, *_MOUNTS, *_LASTING, *_ATTRIBUTES, *_PROCESSES, *_OTHERS, *_MEMORY_FILES, "socket")
    signals = ("kill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "tgkill", "tkill")
    about = ("prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler")
    return [
        *map(Refused, calls),
        *(Refused(call, "only", 0, (pid,)) for call in signals),
        *(Refused(call, "only", 0, (0, pid)) for call in about),
        *_either(),
    ]


def program(network: bool) -> list[Refused]:
    """For a program that starts processes of its own, and talks to a network only if told so."""
    families = (_AF_INET, _AF_INET6, _AF_NETLINK) if network else ()
    return [
        *map(Refused, (*_TRACING, *_KERNEL, *_MOUNTS, *_LASTING)),
        Refused("clone", "flags", 0, (_NEW_NAMESPACES,)),
        Refused("prlimit64", "only", 0, (0,)),
        # Sockets of this machine's own services (containers, desktops, key agents) are never a network.
        Refused("socket", "only", 0, families),
        *_either(),
    ]


def _either() -> list[Refused]:
    return [
        # Its flags lie in memory, where no filter can see them. The C library does without it then.
        Refused("clone3", error=errno.ENOSYS),
        Refused("prctl", "among", 0, (_PR_SET_PDEATHSIG,)),
        # Signals by way of a file's owner.
        Refused("fcntl", "among", 1, (_F_SETSIG, _F_SETOWN, _F_SETOWN_EX)),
        Refused("ioctl", "among", 1, (_FIOSETOWN, _SIOCSPGRP, _TIOCSTI, _TIOCLINUX)),
    ]


def restrict(refused: Iterable[Refused]) -> bool:
    """Put the filter on this process, which must have one thread and have given up new privileges, for good.

    Returns False where the kernel or the processor's kind does not allow it.
    """
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in _ARCHITECTURES:
        return False
    code = assemble(refused, machine)
    array = ctypes.create_string_buffer(b"".join(code), 8 * len(code))
    header = struct.pack("@HxxxxxxP", len(code), ctypes.addressof(array))
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(header), 0, 0) == 0)


def assemble(refused: Iterable[Refused], machine: str) -> list[bytes]:
    """The filter's instructions, of 8 bytes each."""
    audit, column = _ARCHITECTURES[machine]
    code = [
        _step(_LOAD, _ARCHITECTURE_AT),
        _step(_EQUAL, audit, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
        _step(_AT_LEAST, _NEWEST + 1, 0, 1),
        _step(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    for rule in refused:
        number = _X86_ONLY.get(rule.call) if rule.call in _X86_ONLY else _NUMBERS[rule.call][column]
        if number is None or (rule.call in _X86_ONLY and column):
            continue
        body = _body(rule)
        code += [_step(_EQUAL, number, 0, len(body)), *body]
    return [*code, _step(_RETURN, _ALLOW)]


def _body(rule: Refused) -> Sequence[bytes]:
    """What is done once the call is known; it returns whatever the argument is."""
    no, yes = _step(_RETURN, _ERRNO | rule.error), _step(_RETURN, _ALLOW)
    if rule.when == "always":
        return [no]
    found, other = (yes, no) if rule.when == "only" else (no, yes)
    jump = _ANY_BIT if rule.when == "flags" else _EQUAL
    tests = [step for value in rule.values for step in (_step(jump, value, 0, 1), found)]
    return [_step(_LOAD, _ARGUMENTS_AT + 8 * rule.argument), *tests, other]


def _step(operation: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("<HBBI", operation, then, otherwise, value & 0xFFFFFFFF)
