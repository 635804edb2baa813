"""Logging: structlog for the node's own lines and for those of libraries, as text or JSON, to stderr or to a view."""

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor

from node.config import LogSettings
from node.text import clean, clean_lines


def configure(
    settings: LogSettings, write: Callable[[int, str], None] | None = None, stream: TextIO | None = None
) -> None:
    """Send all log lines to `write`, or to `stream` (stderr unless given). Callable again; the last call counts."""
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(
            fmt="iso" if settings.format == "json" else "%H:%M:%S", utc=settings.format == "json"
        ),
        structlog.processors.StackInfoRenderer(),
    ]
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    target = stream or sys.stderr
    colours = write is None and target.isatty()
    handler = _Lines(write) if write is not None else logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(settings, colours)],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    # Libraries are heard from warnings on; they are chatty below.
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("node").setLevel(level)
    logging.captureWarnings(True)
    # They tell developers what to change some day.
    warnings.filterwarnings("ignore", category=FutureWarning)


def get() -> Any:
    """The node's logger."""
    return structlog.get_logger("node")


def _renderers(settings: LogSettings, colours: bool) -> list[Processor]:
    if settings.format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return [
        _clean_values,
        structlog.dev.ConsoleRenderer(colors=colours, sort_keys=False, pad_event_to=0, pad_level=False),
    ]


def _clean_values(logger: Any, method: str, event: EventDict) -> EventDict:
    """Text of strangers in a log line must not steer the terminal it is printed on."""
    return {
        key: value if not isinstance(value, str) else clean_lines(value) if key == "event" else clean(value)
        for key, value in event.items()
    }


class _Lines(logging.Handler):
    """Hands the level and the formatted line to a function."""

    def __init__(self, write: Callable[[int, str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self._write(record.levelno, self.format(record))
