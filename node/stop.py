"""One request to stop, which cancels whatever may be interrupted and nothing else."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import trio


class Stop:
    """Set once, by a signal. Work that may be cut short runs inside `interruptible`."""

    def __init__(self) -> None:
        self.requested = False
        self._scopes: set[trio.CancelScope] = set()

    def request(self) -> None:
        """Ask for a clean end: now and from now on, interruptible work is cancelled."""
        self.requested = True
        for scope in self._scopes:
            scope.cancel()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A block that ends early, without an exception, when a stop is requested."""
        with trio.CancelScope() as scope:
            if self.requested:
                scope.cancel()
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)


async def watch_signals(
    stop: Stop,
    say: Callable[[str, str], None],
    farewell: str = "the last finished round is saved first; a second Ctrl-C ends the node without that",
    *,
    # The stubs that libp2p brings along for trio are older than trio.
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,  # type: ignore[name-defined]
) -> NoReturn:
    """SIGINT, SIGTERM and a closed terminal request a stop; a second one ends the node at once, like Ctrl-C twice."""
    wanted = [signal.SIGINT, signal.SIGTERM]
    # Under nohup it is ignored, and is to stay so.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    with trio.open_signal_receiver(*wanted) as signals:
        task_status.started()
        async for _ in signals:
            if stop.requested:
                raise KeyboardInterrupt
            say("info", f"stopping: {farewell}")
            stop.request()
    raise AssertionError("a signal receiver has no end")
