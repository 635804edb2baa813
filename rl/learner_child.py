"""The learner as a process: `python -m rl.learner_child`, started by the node with a channel to it.

Frames. First comes {"settings", "trained"}, answered with {"ready": description} or {"error"} and the end. Then each
request {"id", "op", "args"} is answered with {"id", "ok": true, "result"} or {"id", "ok": false, "error"}; before that
may come any number of {"id", "progress": [done, total, unit]} and, for chat, {"id", "text": piece}. An error is
{"type", "message", "traceback"}. The types of `rl.errors`, OSError and ValidationError leave the learner usable; any
other ends the process after it is sent.

SIGTERM means: stop what you are doing. generate, fits, update, chat and load raise Stopped from then on; save, export
and describe still work. SIGINT is the parent's alone. The end of the channel ends the process.
"""

import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rl.errors import AnswerError, LearnerError, Stopped
from rl.rollouts import Completion, RolloutGroup, Sampling, ScoredGroup, UpdateStats
from rl.settings import LearnerSettings
from verifiers.base import Task
from verifiers.codec import FrameError
from verifiers.process import Channel, die_with_parent

TASKS = TypeAdapter(list[Task])
SAMPLING = TypeAdapter(Sampling)
ROLLOUTS = TypeAdapter(list[RolloutGroup])
SCORED = TypeAdapter(list[ScoredGroup])
STATS = TypeAdapter(UpdateStats)
COMPLETION = TypeAdapter(Completion)

PROGRESS_SECONDS = 0.1
"""Least time between two progress frames: a person sees no more, and the parent has other things to do."""

LESS = {
    "generate": "lower sampling.max_new_tokens, or sharing.local (with --silo sharing.external too) or "
    "sampling.group_size (in an evaluation evaluation.per_task or evaluation.samples); about three million tokens fit"
}
"""What to change when the answer to an operation does not fit a frame."""

log = logging.getLogger(__name__)


class _OneLine(logging.Formatter):
    """One line a record, which is what the parent reads."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", " | ")


class _Server:
    """Answers requests on a channel until it ends."""

    def __init__(self, channel: Channel, learner: Any, stopping: threading.Event) -> None:
        self._channel = channel
        self._learner = learner
        self._stopping = stopping
        self._operations: dict[str, Callable[[int, Mapping[str, Any]], Any]] = {
            "generate": self._generate,
            "fits": lambda _, args: learner.fits(SCORED.validate_python(args["groups"])),
            "update": self._update,
            "chat": self._chat,
            "save": lambda _, args: learner.save(Path(args["directory"])),
            "load": lambda _, args: learner.load(Path(args["directory"])),
            "export": lambda _, args: learner.export(Path(args["directory"]), merged=bool(args["merged"])),
            "describe": lambda _, args: learner.describe(),
        }

    def serve(self) -> None:
        """Answer until the parent closes the channel."""
        while True:
            try:
                request = self._channel.receive()
            except EOFError:
                return
            self._answer(request)

    def _answer(self, request: Mapping[str, Any]) -> None:
        number, operation = request["id"], request["op"]
        try:
            if self._stopping.is_set() and operation in ("generate", "fits", "update", "chat", "load"):
                raise Stopped("the learner is stopping")
            result = self._operations[operation](number, request["args"])
        # A full disk and a malformed request leave the learner as it was; after anything else nobody knows.
        except (LearnerError, OSError, ValidationError) as error:
            self._channel.send({"id": number, "ok": False, "error": describe_error(error)})
        except Exception as error:
            self._channel.send({"id": number, "ok": False, "error": describe_error(error)})
            raise
        else:
            self._reply(number, operation, result)

    def _reply(self, number: int, operation: str, result: Any) -> None:
        try:
            self._channel.send({"id": number, "ok": True, "result": result})
        except FrameError as error:
            # Nothing of it has been sent.
            advice = LESS.get(operation, "ask for less at once")
            told = AnswerError(f"the answer to {operation} cannot be sent ({error}): {advice}")
            self._channel.send({"id": number, "ok": False, "error": describe_error(told)})

    def _generate(self, number: int, args: Mapping[str, Any]) -> Any:
        groups = self._learner.generate(
            TASKS.validate_python(args["tasks"]),
            SAMPLING.validate_python(args["sampling"]),
            int(args["seed"]),
            base=bool(args["base"]),
            progress=self._progress(number),
        )
        return ROLLOUTS.dump_python(groups)

    def _update(self, number: int, args: Mapping[str, Any]) -> Any:
        groups = SCORED.validate_python(args["groups"])
        return STATS.dump_python(self._learner.update(groups, int(args["seed"]), progress=self._progress(number)))

    def _chat(self, number: int, args: Mapping[str, Any]) -> Any:
        completion = self._learner.chat(
            args["messages"],
            SAMPLING.validate_python(args["sampling"]),
            int(args["seed"]),
            say=lambda text: self._channel.send({"id": number, "text": text}),
        )
        return COMPLETION.dump_python(completion)

    def _progress(self, number: int) -> Callable[[int, int, str], None]:
        last = -PROGRESS_SECONDS

        def report(done: int, total: int, unit: str) -> None:
            nonlocal last
            now = time.monotonic()
            if done == total or now - last >= PROGRESS_SECONDS:
                last = now
                self._channel.send({"id": number, "progress": [done, total, unit]})

        return report


def describe_error(error: BaseException) -> dict[str, Any]:
    """An error as it travels to the parent."""
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "errno": error.errno if isinstance(error, OSError) else None,
    }


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("rl").setLevel(logging.INFO)
    logging.captureWarnings(True)
    # These tell the developers of one library what to change for the next release of another.
    for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
        warnings.filterwarnings("ignore", category=category)


def main() -> int:
    """Serve one parent. Returns the exit status."""
    die_with_parent()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _log_to_stderr()
    channel = Channel.inherited()
    try:
        first = channel.receive()
    except EOFError:
        return 0
    # Threads that spin while they wait starve whatever else runs here, the sandbox and other nodes among it. Read when
    # torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Bars are for a terminal, and this process writes lines for its parent. Read when the libraries are imported.
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    from transformers.utils import logging as transformers_logging

    from rl.learner import Learner

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    try:
        settings = LearnerSettings.model_validate(first["settings"])
        learner = Learner(settings, first.get("trained"), stop=stopping.is_set)
    except (LearnerError, OSError, ValidationError, RuntimeError) as error:
        channel.send({"error": describe_error(error)})
        return 1
    channel.send({"ready": learner.describe()})
    _Server(channel, learner, stopping).serve()
    learner.close()
    return 0


if __name__ == "__main__":
    # As a module of its own, so that the types in its frames have one home.
    raise SystemExit(main())
