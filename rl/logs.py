"""How the processes of a learner log: one line a record on stderr, `LEVEL text`, which the node reads."""

import logging
import os
import sys
import warnings


class _OneLine(logging.Formatter):
    """One line a record, which is what the parent reads."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", " | ")


def log_to_stderr(prefix: str = "") -> None:
    """Log from now on to stderr, with `prefix` before each text."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(f"%(levelname)s {prefix}%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("rl").setLevel(logging.INFO)
    logging.captureWarnings(True)
    # These tell the developers of one library what to change for the next release of another.
    for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
        warnings.filterwarnings("ignore", category=category)


def silence_libraries() -> None:
    """Have transformers log like everything else. Imports it."""
    # Bars are for a terminal, and these processes write lines. Read when the libraries are imported.
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
