"""Real nodes for benchmarks: `swarmnode`, run by this Python, which never outlives the process that started it."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from verifiers import launch

# Nodes that meet only those whose addresses they are given, on this machine alone.
ISOLATED = (
    *("--set", "network.mdns=false", "--set", "network.dht=false", "--set", "network.upnp=false"),
    *("--set", "storage.min_free_mb=0", "--set", "evaluation.every=0"),
)


class NodeFailed(Exception):
    """A command that a benchmark ran went wrong. The message ends with what it said."""


def environment() -> dict[str, str]:
    """This process's own, without what would change a node's settings, and without the network."""
    return _unset(os.environ) | {"HF_HUB_OFFLINE": "1"}


def _unset(given: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in given.items() if not name.startswith("SWARMNODE_")}


def start(
    command: Sequence[str], output: int | IO[bytes], given: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A process that does not outlive this one, with the environment that is `given` (else this process's own), but
    for what would change a node's settings. A Ctrl-C at the terminal is not for it. Raises OSError.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=_unset(os.environ if given is None else given),
        start_new_session=True,
    )


@contextmanager
def running(words: Sequence[str], log: Path, module: str = "node.cli") -> Iterator[subprocess.Popen[bytes]]:
    """`swarmnode WORDS` until the block is left, which kills what has not ended. What it says goes into `log`."""
    with log.open("ab") as output:
        process = start([sys.executable, "-m", module, *words], output, environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run(words: Sequence[str], log: Path, seconds: float) -> None:
    """`swarmnode WORDS` until it ends. Raises NodeFailed if it fails or takes more than `seconds`."""
    with running(words, log) as process:
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
    if status != 0:
        raise failed(words, log, f"still ran after {seconds:g} s" if status is None else f"ended with status {status}")


def failed(words: Sequence[str], log: Path, how: str) -> NodeFailed:
    """The error that tells how a node went wrong."""
    said = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
    return NodeFailed(f"swarmnode {' '.join(words)} {how}; it said\n{said}")
