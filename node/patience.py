"""Deadlines for what another process is asked to do, which count only the time that this one was there to notice."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from node.background import background

_LONGEST_LOOK = 5.0
"""Time is counted in pieces of at most so many seconds. One that took twice as long is not counted: this process was
stopped meanwhile (a suspended machine, SIGSTOP), and what it waits for may have been too."""


@asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """Raises trio.TooSlowError if the block takes longer than `seconds`, time in which this process stood still apart.

    A cancellation from outside comes out as itself.
    """
    # Shielded, so that the clock is not cancelled too: two of them would come out as a group, which nobody expects.
    clock = trio.CancelScope(shield=True)
    async with background() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(_cancel_after, seconds, scope, clock)
            try:
                yield
            finally:
                clock.cancel()
        if scope.cancelled_caught:
            raise trio.TooSlowError


async def _cancel_after(seconds: float, scope: trio.CancelScope, clock: trio.CancelScope) -> None:
    look = min(seconds / 4, _LONGEST_LOOK)
    with clock:
        while seconds > 0:
            begun = trio.current_time()
            await trio.sleep(look)
            if trio.current_time() - begun < 2 * look:
                seconds -= look
        scope.cancel()
