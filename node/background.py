"""Tasks that only serve a block of code and end with it."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio


@asynccontextmanager
async def background() -> AsyncIterator[trio.Nursery]:
    """A nursery for such tasks: they are cancelled when the block ends.

    If the block or one task fails, that error comes out as itself, so that callers can name it in an `except`; if
    several fail at once they come out as a group, so that none is hidden.
    """
    with unwrapped():
        async with trio.open_nursery() as nursery:
            yield nursery
            nursery.cancel_scope.cancel()


@contextmanager
def unwrapped() -> Iterator[None]:
    """Nurseries inside the block wrap errors into groups: one that is alone in them comes out as itself."""
    try:
        yield
        return
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            (error,) = error.exceptions
        if error is group:
            raise
    raise error
