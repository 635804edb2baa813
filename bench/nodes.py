"""Real nodes for benchmarks: `swarmnode`, run by this Python, which never outlives the process that started it."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from verifiers import launch

# Nodes that meet only those whose addresses they are given, on this machine alone.
ISOLATED = (
    *("--set", "network.mdns=false", "--set", "network.dht=false", "--set", "network.upnp=false"),
    *("--set", "storage.min_free_mb=0", "--set", "evaluation.every=0"),
)


class NodeFailed(Exception):
    """A command that a benchmark ran went wrong. The message ends with what it said."""


def command(*words: str, module: str = "node.cli") -> list[str]:
    """`swarmnode WORDS`, or another program of ours, ended with whoever starts it."""
    return [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), sys.executable, "-m", module, *words]


def environment() -> dict[str, str]:
    """This process's own, without what would change a node's settings, and without the network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARMNODE_")}
    return kept | {"HF_HUB_OFFLINE": "1"}


@contextmanager
def running(words: Sequence[str], log: Path, module: str = "node.cli") -> Iterator[subprocess.Popen[bytes]]:
    """`swarmnode WORDS` until the block is left, which kills what has not ended. What it says goes into `log`."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command(*words, module=module),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(),
            start_new_session=True,
        )
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
