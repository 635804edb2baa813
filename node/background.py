"""Tasks that only serve a block of code and end with it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from rl.nurseries import unwrapped


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
