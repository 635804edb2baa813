"""Long work on weights: how it tells its progress, how it is told to stop, and what it says when memory runs out."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rl.errors import OutOfMemory, Stopped

Progress = Callable[[int, int, str], None]
"""Called with what is done, what there is, and the unit."""
Stop = Callable[[], bool]
"""Asked now and then whether to stop."""


def never() -> bool:
    """A `Stop` that never stops."""
    return False


def no_progress(done: int, total: int, unit: str) -> None:
    """A `Progress` that tells nobody."""


def check_stop(stop: Stop) -> None:
    """Raise Stopped if `stop` says so."""
    if stop():
        raise Stopped("stopped on request")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on a GPU or a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "not enough memory" in str(error) or "out of memory" in str(error)
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none: allocators write whole pages."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def give_back_memory() -> None:
    """Hand what the allocator holds and nobody uses back to the system, where the C library can.

    Sampling and training ask for pieces of ever different sizes, between which glibc keeps gaps: after fifty rounds of
    SmolLM2-135M they came to a gigabyte.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


@contextmanager
def out_of_memory_as(advice: str) -> Iterator[None]:
    """Raise OutOfMemory with `advice` (what ran out, and what to do) when memory runs out in the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"{advice} ({first_line(error)})") from error
