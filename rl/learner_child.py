"""The learner as a process: `python -m rl.learner_child`, started by the node with a channel to it.

Frames. First comes {"settings", "trained"}, answered with {"ready": description} or {"error"} and the end. Then each
request {"id", "op", "args"} is answered with {"id", "ok": true, "result"} or {"id", "ok": false, "error"}; before that
may come any number of {"id", "progress": [done, total, unit]}, of {"id", "busy": true}, which says that the work goes
on, and, for chat, of {"id", "text": piece}. What generate_ahead begins may go on while others are answered. An error is
{"type", "message", "traceback"}. The types of `rl.errors`, OSError and ValidationError leave the learner usable; any
other ends the process after it is sent.

SIGTERM means: stop what you are doing. All but save, export and describe raise Stopped from then on. SIGINT is the
parent's alone. The end of the channel ends the process.
"""

import atexit
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from rl.chat import chat
from rl.engines import guard
from rl.errors import AnswerError, LearnerError, RankLost, Stopped
from rl.logs import log_to_stderr, silence_libraries
from rl.rollouts import ChatAnswer, RolloutGroup, Sampling, ScoredGroup, UpdateStats
from rl.settings import LearnerSettings
from verifiers.base import Task
from verifiers.codec import FrameError
from verifiers.imports import importing
from verifiers.process import Channel, die_with_parent

TASKS = TypeAdapter(list[Task])
SAMPLING = TypeAdapter(Sampling)
ROLLOUTS = TypeAdapter(list[RolloutGroup])
SCORED = TypeAdapter(list[ScoredGroup])
STATS = TypeAdapter(UpdateStats)
CHAT_ANSWER = TypeAdapter(ChatAnswer)

PROGRESS_SECONDS = 0.1
"""Least time between two progress frames: a person sees no more, and the parent has other things to do."""

_FEWER_TOKENS = (
    "lower sampling.max_new_tokens, or sharing.local (with --silo sharing.alone) or "
    "sampling.group_size (in an evaluation evaluation.per_task or evaluation.samples); about three million tokens fit"
)
LESS = {"generate": _FEWER_TOKENS, "generated_ahead": _FEWER_TOKENS}
"""What to change when the answer to an operation does not fit a frame."""

BUSY_SECONDS = 1.0
"""Least time between two frames that say no more than that the work goes on."""

log = logging.getLogger(__name__)


class _Stop:
    """Asked by long work whether to stop. That it asks shows that it goes on, and the parent is told so."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._requested = threading.Event()
        self._told = 0.0
        self._request: int | None = None

    def work_on(self, request: int | None) -> None:
        """The request in hand from now on."""
        self._request = request
        self._told = time.monotonic()

    def __call__(self) -> bool:
        now = time.monotonic()
        if self._request is not None and now - self._told >= BUSY_SECONDS:
            self._told = now
            self._channel.send({"id": self._request, "busy": True})
        return self._requested.is_set()

    def set(self) -> None:
        """Stop from now on. Called by a signal handler, which may interrupt a send."""
        self._requested.set()

    def is_set(self) -> bool:
        """Whether to stop, without telling anybody."""
        return self._requested.is_set()


class _Server:
    """Answers requests on a channel until it ends."""

    def __init__(self, channel: Channel, learner: Any, stopping: _Stop) -> None:
        self._channel = channel
        self._learner = learner
        self._stopping = stopping
        self._operations: dict[str, Callable[[int, Mapping[str, Any]], Any]] = {
            "generate": self._generate,
            "generate_ahead": self._generate_ahead,
            "generated_ahead": self._generated_ahead,
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
            if self._stopping.is_set() and operation not in ("save", "export", "describe"):
                raise Stopped("the learner is stopping")
            self._stopping.work_on(number)
            try:
                result = self._operations[operation](number, request["args"])
            finally:
                self._stopping.work_on(None)
        except RankLost as error:
            # Not an answer but the end, which the node sees: the next learner goes on from the last checkpoint.
            log.error("%s", error)
            os._exit(1)
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
            keep=bool(args.get("keep", True)),
            progress=self._progress(number),
        )
        return ROLLOUTS.dump_python(groups)

    def _generate_ahead(self, number: int, args: Mapping[str, Any]) -> None:
        self._learner.generate_ahead(
            TASKS.validate_python(args["tasks"]),
            SAMPLING.validate_python(args["sampling"]),
            int(args["seed"]),
            progress=self._progress(number),
        )

    def _generated_ahead(self, number: int, args: Mapping[str, Any]) -> Any:
        groups, seconds = self._learner.generated_ahead(progress=self._progress(number))
        return [ROLLOUTS.dump_python(groups), seconds]

    def _update(self, number: int, args: Mapping[str, Any]) -> Any:
        groups = SCORED.validate_python(args["groups"])
        return STATS.dump_python(self._learner.update(groups, int(args["seed"]), progress=self._progress(number)))

    def _chat(self, number: int, args: Mapping[str, Any]) -> Any:
        answer = chat(
            self._learner,
            args["messages"],
            SAMPLING.validate_python(args["sampling"]),
            int(args["seed"]),
            (lambda text: self._channel.send({"id": number, "text": text})) if args.get("stream", True) else None,
        )
        return CHAT_ANSWER.dump_python(answer)

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


def main() -> int:
    """Serve one parent. Returns the exit status."""
    die_with_parent()
    guard.announce(os.environ)
    channel = Channel.inherited()
    stopping = _Stop(channel)
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to_stderr()
    try:
        first = channel.receive()
    except EOFError:
        return 0
    with importing():
        silence_libraries()
        from rl.learner import Learner

    try:
        settings = LearnerSettings.model_validate(first["settings"])
        learner = Learner(settings, first.get("trained"), stop=stopping)
        learner.open_engine()
    except RankLost as error:
        # As when it happens later: the node starts another learner.
        log.error("%s", error)
        return 1
    except (LearnerError, OSError, ValidationError, RuntimeError) as error:
        channel.send({"error": describe_error(error)})
        return 1
    channel.send({"ready": learner.describe()})
    _Server(channel, learner, stopping).serve()
    learner.close()
    return 0


def _leave(status: int) -> NoReturn:
    """End the process without taking apart all that lies in memory.

    That takes more than a second of processor time, and on a busy machine ten, while whoever stopped the node waits.
    """
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__mp_main__":
    # A process below the learner imports its parent's main module first of all, seconds before anything of vLLM.
    guard.end_with_parent()
    # Until vLLM, imported, calls it again.
    gc.disable()

if __name__ == "__main__":
    # As a module of its own, so that the types in its frames have one home.
    _leave(main())
