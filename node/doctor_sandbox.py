"""The part of `swarmnode doctor` about verifiers: what confines them on this machine, and whether tasks can be made."""

from collections.abc import Iterator

import trio

from node.config import Config
from node.doctor_network import Check
from verifiers.base import VerifierError
from verifiers.sandbox import open_sandbox
from verifiers.stream import HELD_OUT_SEED, TaskStream


def check_sandbox(config: Config) -> Iterator[Check]:
    """Start the verifiers of this configuration and make a task of each kind."""

    async def try_out() -> list[Check]:
        async with open_sandbox(config.verifiers, [config.node.data_dir]) as sandbox:
            await sandbox.ready()
            try:
                stream = await TaskStream.open(sandbox, config.tasks.mix, HELD_OUT_SEED)
            except VerifierError as error:
                tasks = Check("tasks", "fail", str(error))
            else:
                count = f"{len(stream.kinds)} kind{'' if len(stream.kinds) == 1 else 's'}"
                tasks = Check("tasks", "ok", f"{count} can be made: {', '.join(stream.kinds)}")
            # Of programs it is known once they have been started.
            return [*(_isolation(limit, done) for limit, done in sandbox.isolation.items()), tasks]

    try:
        yield from trio.run(try_out)
    except VerifierError as error:
        yield Check("sandbox", "fail", str(error))
    for name, command in config.verifiers.commands.items():
        if "everything" in command.needs:
            text = f"program {name}: confined in nothing, as [verifiers.commands.{name}] needs everything"
            yield Check("sandbox", "note", text)


def _isolation(limit: str, done: bool) -> Check:
    """Whether the process that scores answers, which are text of a model, is limited so, and what that means."""
    meaning, risk = _ISOLATION.get(limit, (f"limited in {limit}", "the system does not allow this limit"))
    return Check("sandbox", "ok" if done else "note", f"{limit}: {meaning if done else risk}")


_CONTAINER = "run the node in a container"
_NAMESPACES = (
    "allow unprivileged user namespaces (sysctl user.max_user_namespaces, and no profile of AppArmor against it)"
)
_LANDLOCK = "boot a Linux kernel with Landlock (5.13 or newer, `landlock` in the list of its parameter lsm)"
_SECCOMP = "allow seccomp filters (prctl PR_SET_SECCOMP) on Linux, x86-64 or arm64"

_ISOLATION = {
    "network": (
        "code that scores answers cannot reach the network",
        f"not cut off, so an answer that takes over its scorer could reach the network: {_NAMESPACES}, or {_CONTAINER}",
    ),
    "memory": (
        "an answer that takes more than [verifiers] memory_mb ends its scorer alone",
        f"not limited, so one answer can take all memory of this machine: {_CONTAINER} with a memory limit",
    ),
    "privileges": (
        "code that scores answers cannot gain rights",
        f"not given up, so code that scores answers could use setuid programs: {_CONTAINER}",
    ),
    "secrets": (
        "code that scores answers can read libraries and the files of its tasks alone, and change none",
        "within reach, so an answer that takes over its scorer could read this node's identity key and whatever else"
        f" this user can: {_LANDLOCK}, or {_CONTAINER} as a user of its own",
    ),
    "processes": (
        "code that scores answers can start none, and do nothing to others",
        "not limited, so an answer that takes over its scorer could start programs and end others of this user:"
        f" {_SECCOMP}, or {_CONTAINER}",
    ),
    "files": (
        "code that scores answers can write nothing into files",
        f"not limited, so an answer that takes over its scorer could write files of this user: {_CONTAINER}",
    ),
    "program network": (
        "programs that score answers cannot reach the network, unless their settings say so",
        f"not cut off, so a program that an answer takes over could reach it: {_NAMESPACES}",
    ),
    "program disk": (
        "what programs that score answers write is in memory, at most [verifiers] disk_mb, and gone with them",
        f"not limited in all, so a program that an answer takes over could fill the disk: {_NAMESPACES}",
    ),
    "program processes": (
        "programs that score answers see their own alone, start some hundred at most, and leave none behind",
        f"not limited, so a program that an answer takes over could start any number: {_NAMESPACES}; for a node of root"
        " Linux 6.14 or newer, or an ordinary user",
    ),
    "program memory": (
        "each process of a program that scores answers has at most [verifiers] memory_mb",
        f"not limited, so a program that an answer takes over could take all: {_CONTAINER} with a memory limit",
    ),
    "program privileges": (
        "programs that score answers cannot gain rights",
        f"not given up, so a program that an answer takes over could use setuid programs: {_CONTAINER}",
    ),
    "program files": (
        "programs that score answers reach libraries and their own alone",
        f"not limited, so a program that an answer takes over could read this node's identity key: {_LANDLOCK}",
    ),
    "program calls": (
        "programs that score answers cannot trace others, mount anything or reach services of this machine",
        f"not limited, so a program that an answer takes over can try more of the kernel: {_SECCOMP}",
    ),
}
"""What a limit of `verifiers.isolation` or `verifiers.confined` means, and what its lack means."""
