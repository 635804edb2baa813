"""What keeps the processes that vLLM starts below the learner from outliving it, and the learner from waiting for them.

`end_with_parent` runs in each of those processes, `watch` in the learner. Imports neither torch nor vLLM: it is to be
there before them.
"""

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, MutableMapping
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from verifiers import launch
from verifiers.imports import keep

LEARNER_VARIABLE = "SWARMNODE_LEARNER"
"""The learner's process id, in its environment and in that of all it starts."""

ENGINE_LOST = 75
"""Exit status of a learner that lost a process of its engine: it would have waited for it for ever."""

LOOK_SECONDS = 0.5

SHARED, OPENMP = "vllm_dist_", "__KMP_REGISTERED_LIB_"
"""How names of shared memory begin: what vLLM's workers talk through on a CPU, and what Intel's OpenMP keeps."""

SETTLED_SECONDS = 10.0

TITLE = "VLLM"
"""What vLLM's processes call themselves begins with this."""

log = logging.getLogger(__name__)


def announce(environment: MutableMapping[str, str]) -> None:
    """Called by the learner, with its environment, before it imports vLLM."""
    environment[LEARNER_VARIABLE] = str(os.getpid())
    # A forked process would take torch's threads for running, which they are not, and the plugins for loaded.
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if plugins := environment.get("VLLM_PLUGINS"):
        environment["VLLM_PLUGINS"] = f"{plugins},swarmnode"
    remove_stale()


def remove_stale(directory: Path = Path("/dev/shm")) -> None:
    """Remove the shared memory through which killed workers of vLLM talked, which nothing else does on a CPU, and the
    page that Intel's OpenMP keeps there for each process.
    """
    left = {path for name in (SHARED, OPENMP) for path in directory.glob(f"{name}*") if _is_left(path)}
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        with contextlib.suppress(OSError):
            text = maps.read_text()
            left = {path for path in left if str(path) not in text}
    for path in left:
        path.unlink(missing_ok=True)


def _is_left(path: Path) -> bool:
    """Whether a file is one's own, and so old that whoever made it has begun to use it, if it lives."""
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        return status.st_uid == os.getuid() and time.time() - status.st_mtime > SETTLED_SECONDS
    return False


def end_with_parent() -> None:
    """End this process with the one that started it, if the learner is above it. vLLM calls it as a plugin.

    Nothing happens in the learner itself, whose parent is the node, and in a vLLM that is none of ours.
    """
    learner = os.environ.get(LEARNER_VARIABLE)
    if learner is None or int(learner) == os.getpid():
        return
    if not gc.isenabled():
        # It was of no use while vLLM was imported (`verifiers.imports`).
        keep()
        gc.enable()
    launch.end_with_parent()
    # The parent may have gone before it was asked for, and then nothing would ever come.
    if int(learner) not in {process.pid for process in psutil.Process().parents()}:
        os.kill(os.getpid(), signal.SIGKILL)


def watch(lost: Callable[[str], None] | None = None, tidy: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Watch the processes that vLLM has started from this one; to be called once the engine is open.

    When one of them ends, `lost` is told which in a thread of its own; by default it says so, calls `tidy` and ends the
    learner with status ENGINE_LOST, since calls to vLLM then never return. Call what is returned before closing the
    engine.
    """
    children = multiprocessing.active_children()
    below = [process for child in children for process in _workers(child)]
    reader, writer = os.pipe()
    thread = threading.Thread(
        target=_watch, args=(children, below, reader, lost or partial(_end, tidy)), daemon=True, name="watch-engine"
    )
    thread.start()
    watching = threading.Lock()

    def unwatch() -> None:
        if watching.acquire(blocking=False):
            os.close(writer)
            thread.join()
            os.close(reader)

    return unwatch


def _workers(child: BaseProcess) -> list[psutil.Process]:
    """The processes of vLLM below one of this process's: it notices itself when one is gone, but not soon."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [
            p for p in psutil.Process(child.pid).children(recursive=True) if " ".join(p.cmdline()).startswith(TITLE)
        ]
    return []


def _watch(children: list[BaseProcess], below: list[psutil.Process], reader: int, lost: Callable[[str], None]) -> None:
    while True:
        gone = wait([reader, *(child.sentinel for child in children)], LOOK_SECONDS if below else None)
        if reader in gone:
            return
        ended = [f"{child.name} ({child.pid})" for child in children if child.sentinel in gone]
        ended += [f"a worker ({process.pid})" for process in below if not _runs(process)]
        if ended:
            lost(" and ".join(ended))
            return


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(tidy: Callable[[], None], what: str) -> None:
    log.error("the engine has lost %s", what)
    try:
        tidy()
    finally:
        os._exit(ENGINE_LOST)
