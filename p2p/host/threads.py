"""Blocking libraries, in threads that nobody has to wait for."""

from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")


async def in_thread(action: Callable[..., T], *arguments: object) -> T:
    """`action(*arguments)` in a worker thread. Cancelled, it leaves the thread to finish alone, its result lost."""
    # The stubs that libp2p brings along for trio are older than trio.
    return await trio.to_thread.run_sync(action, *arguments, abandon_on_cancel=True)  # type: ignore[call-arg]
