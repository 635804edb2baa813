"""Work without the garbage collector, which would look through a million new objects again and again and find nothing.

It is a fifth of the time that torch and transformers take to import, and nearly a third of vLLM's.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect nothing meanwhile: for work of seconds that makes many objects and keeps them."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Collect nothing meanwhile, and never look again at what is there at the end: for imports alone."""
    with uncollected():
        try:
            yield
        finally:
            keep()


def keep() -> None:
    """Never look again at what is there now, until the process ends."""
    gc.freeze()
    # Some extension modules complain about whatever of theirs is then still there.
    atexit.register(gc.unfreeze)
