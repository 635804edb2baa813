"""The node's log, followed by those who look over HTTP."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import structlog
import trio

from node.api.models import LogLine
from node.masking import MASK, masked
from node.text import printable


@contextmanager
def following(tell: Callable[[LogLine], None], secret: str = "") -> Iterator[None]:
    """Tell each line of the log in the event loop, without secrets, among them the text `secret`.

    To be entered inside the event loop, once the log goes where it should.
    """
    handler = _Follower(tell, secret)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _without_stamp,
                structlog.dev.ConsoleRenderer(colors=False, sort_keys=False, pad_event_to=0, pad_level=False),
            ],
        )
    )
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


class _Follower(logging.Handler):
    def __init__(self, tell: Callable[[LogLine], None], secret: str) -> None:
        super().__init__()
        self._tell = tell
        self._secret = secret
        self._loop = trio.lowlevel.current_trio_token()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`. Lines come from any thread."""
        if isinstance(record.msg, dict) and record.msg.get("event") == "round":
            return  # told as a round already
        text = self.format(record)
        if self._secret:
            text = text.replace(self._secret, MASK)
        line = LogLine(time=record.created, level=record.levelname.lower(), text=printable(str(masked(("log",), text))))
        # A line that comes after the end of the loop has no reader any more.
        with suppress(trio.RunFinishedError):
            self._loop.run_sync_soon(self._tell, line)


def _without_stamp(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {key: value for key, value in event.items() if key not in ("level", "timestamp")}
