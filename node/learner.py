"""The node's end of the learner process: `rl.protocols.Learner` over frames, and what happens when the child dies.

The learner holds the weights and the engine; it can be out of memory, out of luck or killed without taking the node
along. Requests are answered one at a time, in order.
"""

import contextlib
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import trio
from pydantic import BaseModel, TypeAdapter, ValidationError

from node.background import background
from node.errors import NodeError
from node.patience import patience
from rl.engines.guard import ENGINE_LOST
from rl.engines.openmp import waiting
from rl.errors import LearnerError, PromptError, TrainingError
from rl.rollouts import ChatAnswer, RolloutGroup, Sampling, ScoredGroup, UpdateStats
from rl.settings import LearnerSettings
from verifiers.base import Task
from verifiers.codec import FrameError
from verifiers.process import Child, spawn

_TASKS = TypeAdapter(list[Task])
_ROLLOUTS = TypeAdapter(list[RolloutGroup])
_AHEAD = TypeAdapter(tuple[list[RolloutGroup], float])
_SCORED = TypeAdapter(list[ScoredGroup])
_SAMPLING = TypeAdapter(Sampling)
_STATS = TypeAdapter(UpdateStats)
_FITS = TypeAdapter(list[bool])
_CHAT_ANSWER = TypeAdapter(ChatAnswer)

STOP_SECONDS = 30.0
"""How long a request that was told to stop may take to notice: it looks between decode steps and micro-batches."""

START_SECONDS = 3600.0
"""How long a learner may take to get its model, at least: a download is silent. One that takes longer goes on where it
was with the next learner."""

TIDY_SECONDS = 2.0
"""How long the processes below a learner get to clean up after it (shared memory) before they are killed too."""

_EXIT_SECONDS = 5.0
_REMEMBERED_LINES = 20

_FORESEEN = {kind.__name__ for kind in LearnerError.__subclasses__()}

Progress = Callable[[int, int, str], None]
LogLine = Callable[[str, str], None]
T = TypeVar("T")


class _Error(BaseModel):
    """See `rl.learner_child.describe_error`."""

    type: str
    message: str
    traceback: str = ""
    errno: int | None = None


class _Frame(BaseModel):
    """What a learner says: see `rl.learner_child`."""

    id: int | None = None
    ready: dict[str, Any] | None = None
    busy: bool = False
    progress: tuple[int, int, str] | None = None
    text: str | None = None
    ok: bool | None = None
    result: Any = None
    error: _Error | None = None


class LearnerDied(NodeError):
    """The learner process ended by itself; another one can take over from the last checkpoint."""


class LearnerFailed(NodeError):
    """The learner could not do what it was asked and says why. Its policy is as it was."""


class PromptRefused(LearnerFailed):
    """The model's chat template or tokenizer refuses these messages; others may be answered."""


class LearnerProcess:
    """One life of the learner. Get one from `open_learner`.

    Cancelling a request stops the learner's work and leaves the policy as it was before the request; after that only
    `save` still works, which is what a node needs on its way out.
    """

    def __init__(self, child: Child, on_progress: Progress) -> None:
        self._child = child
        self._on_progress = on_progress
        self._lock = trio.Lock()
        self._next_id = 0
        self._verdict = ""
        self._patience = START_SECONDS
        self.last_lines: deque[str] = deque(maxlen=_REMEMBERED_LINES)
        self.log_ended = trio.Event()
        self.description: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        """The learner's process id."""
        return self._child.pid

    async def start(self, settings: LearnerSettings, trained: str | None) -> None:
        """Load the model. `trained` names the model that a checkpoint was made with, if there is one.

        From then on it may be silent for `settings.engine.patience` seconds while it works. Raises LearnerFailed if the
        model cannot be had, LearnerDied if the process ends or is taken for hung.
        """
        self._patience = max(START_SECONDS, settings.engine.patience)
        await self._send({"settings": settings.model_dump(mode="json"), "trained": trained})
        answer = await self._frame()
        self._patience = settings.engine.patience
        if answer.error is not None:
            raise _failure(answer.error)
        if answer.ready is None:
            raise await self._garbled()
        self.description = answer.ready

    async def generate(
        self, tasks: Sequence[Task], sampling: Sampling, seed: int, *, keep: bool = True
    ) -> list[RolloutGroup]:
        """See `rl.protocols.Learner.generate`. Without `keep` nothing of it is in the next update's statistics."""
        result = await self._call(
            "generate",
            tasks=_TASKS.dump_python(list(tasks)),
            sampling=_SAMPLING.dump_python(sampling),
            seed=seed,
            base=False,
            keep=keep,
        )
        return await self._taken(_ROLLOUTS, result)

    async def generate_ahead(self, tasks: Sequence[Task], sampling: Sampling, seed: int) -> None:
        """See `rl.protocols.Learner.generate_ahead`."""
        await self._call(
            "generate_ahead",
            tasks=_TASKS.dump_python(list(tasks)),
            sampling=_SAMPLING.dump_python(sampling),
            seed=seed,
        )

    async def generated_ahead(self) -> tuple[list[RolloutGroup], float]:
        """See `rl.protocols.Learner.generated_ahead`."""
        return await self._taken(_AHEAD, await self._call("generated_ahead"))

    async def fits(self, groups: Sequence[ScoredGroup]) -> list[bool]:
        """See `rl.protocols.Learner.fits`."""
        return await self._taken(_FITS, await self._call("fits", groups=_SCORED.dump_python(list(groups))))

    async def update(self, groups: Sequence[ScoredGroup], seed: int) -> UpdateStats:
        """See `rl.protocols.Learner.update`. If it was applied before a cancellation reached it, it returns."""
        result = await self._call("update", groups=_SCORED.dump_python(list(groups)), seed=seed)
        return await self._taken(_STATS, result)

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling: Sampling,
        seed: int,
        on_text: Callable[[str], None] | None = None,
    ) -> ChatAnswer:
        """The policy's next turn in a chat (`sampling.samples` is 1); see `rl.chat`. `on_text` gets it as it comes.

        Raises PromptRefused.
        """
        result = await self._call(
            "chat",
            on_text,
            messages=[dict(message) for message in messages],
            sampling=_SAMPLING.dump_python(sampling),
            seed=seed,
            stream=on_text is not None,
        )
        return await self._taken(_CHAT_ANSWER, result)

    async def save(self, directory: Path) -> None:
        """Write policy and optimiser into an existing empty directory."""
        await self._call("save", directory=str(directory))

    async def load(self, directory: Path) -> None:
        """Take policy and optimiser from what `save` wrote."""
        await self._call("load", directory=str(directory))

    async def _call(self, operation: str, on_text: Callable[[str], None] | None = None, /, **arguments: Any) -> Any:
        async with self._lock:
            self._next_id += 1
            identifier = self._next_id
            await self._send({"id": identifier, "op": operation, "args": arguments})
            try:
                answer = await self._answer(identifier, on_text)
            except trio.Cancelled:
                stopped = await self._stop(identifier)
                if stopped is None or not stopped.ok:
                    raise
                # It had finished after all. Saying so keeps this side's count of updates right; the caller meets the
                # cancellation at its next checkpoint.
                answer = stopped
        if answer.ok:
            return answer.result
        if answer.error is None:
            raise await self._garbled()
        raise _failure(answer.error)

    async def _taken(self, adapter: TypeAdapter[T], result: Any) -> T:
        """A result, if it is what it should be. Raises LearnerDied."""
        try:
            return adapter.validate_python(result)
        except ValidationError as error:
            raise await self._garbled() from error

    async def _send(self, frame: dict[str, Any]) -> None:
        """Send a whole frame: half of one would leave the learner waiting for the rest."""
        try:
            with trio.CancelScope(shield=True):
                async with patience(STOP_SECONDS):
                    await self._child.frames.send(frame)
        except FrameError as error:
            # Nothing was sent, so the learner is as it was.
            raise LearnerFailed(f"too much for one request to the learner: {error}") from error
        except trio.TooSlowError as error:
            self._verdict = f"did not take a request within {STOP_SECONDS:g} s and was killed"
            raise await self._died() from error
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise await self._died() from error

    async def _stop(self, identifier: int) -> "_Frame | None":
        """Tell the learner to stop its work. Its answer, or None if it had to be killed (and can save no more)."""
        self._child.signal(signal.SIGTERM)
        try:
            with trio.CancelScope(shield=True):
                async with patience(STOP_SECONDS):
                    return await self._answer(identifier)
        except LearnerDied:
            return None
        except trio.TooSlowError:
            self._verdict = f"did not stop within {STOP_SECONDS:g} s and was killed; its last rounds will be done again"
            await self._child.kill()
            return None

    async def _answer(self, identifier: int, on_text: Callable[[str], None] | None = None) -> "_Frame":
        while True:
            answer = await self._frame()
            if answer.id != identifier or answer.busy:
                continue
            if answer.progress is not None:
                self._on_progress(*answer.progress)
            elif answer.text is not None:
                if on_text is not None:
                    on_text(answer.text)
            elif answer.ok is not None:
                return answer
            else:
                raise await self._garbled()

    async def _frame(self) -> "_Frame":
        """The next frame. Raises LearnerDied, also if none has come for so long that the learner must be hung."""
        try:
            async with patience(self._patience):
                return _Frame.model_validate(await self._child.frames.receive())
        except ValidationError as error:
            raise await self._garbled() from error
        except trio.TooSlowError as error:
            what = "answer" if self.description else "get ready"
            self._verdict = f"did not {what} for {self._patience:g} s ([engine] patience) and was killed"
            raise await self._died() from error
        except (EOFError, FrameError, trio.ClosedResourceError) as error:
            raise await self._died() from error

    async def _garbled(self) -> LearnerDied:
        self._verdict = "said something else than it should and was killed"
        return await self._died()

    async def _died(self) -> LearnerDied:
        status = await self._child.kill()
        with trio.CancelScope(shield=True), trio.move_on_after(1):
            await self.log_ended.wait()
        if self._verdict:
            how = self._verdict
        elif status == ENGINE_LOST:
            how = "lost a process of its engine and ended"
        elif status < 0:
            how = f"was ended by {_name(-status)}"
            if -status == signal.SIGKILL:
                how += " (when nobody sent it, the system ran out of memory: lower [training] token_budget or"
                how += " [engine] max_sequences)"
        else:
            how = f"ended with status {status}"
        said = "".join(f"\n  {line}" for line in self.last_lines)
        return LearnerDied(f"the learner process {how}{said}")


@contextlib.asynccontextmanager
async def open_learner(on_progress: Progress, on_log: LogLine) -> AsyncIterator[LearnerProcess]:
    """A learner process, to be given its settings by `start`. It is gone, with all it started, when the block is left.

    `on_progress(done, total, unit)` follows long work, `on_log(level, text)` gets each line the learner logs.
    """
    reader, writer = os.pipe()
    try:
        child = spawn("rl.learner_child", env=_environment(), stderr=writer, tidy=TIDY_SECONDS)
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    learner = LearnerProcess(child, on_progress)

    def remember(level: str, text: str) -> None:
        learner.last_lines.append(text)
        on_log(level, text)

    async with background() as nursery:
        nursery.start_soon(_read_log, reader, remember, learner.log_ended)
        try:
            yield learner
        finally:
            # The end of the channel tells the learner to go.
            with trio.CancelScope(shield=True):
                await child.frames.aclose()
                with trio.move_on_after(_EXIT_SECONDS):
                    await child.wait()
                await child.kill()


def _environment() -> dict[str, str]:
    """The node's own, for caches, proxies and tokens; and what lies in the working directory is not imported."""
    return {**os.environ, **waiting(os.environ), "TOKENIZERS_PARALLELISM": "false", "PYTHONSAFEPATH": "1"}


async def _read_log(reader: int, on_log: LogLine, ended: trio.Event) -> None:
    """Hand on the learner's log, a line at a time: `LEVEL text`, or bare text from libraries."""
    async with trio.lowlevel.FdStream(reader) as stream:
        rest = b""
        async for piece in stream:
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                text = line.decode("utf-8", "replace").rsplit("\r", 1)[-1].rstrip()
                level, _, message = text.partition(" ")
                if level in {"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"}:
                    on_log(level.lower(), message)
                elif text:
                    on_log("debug", text)
    ended.set()


def _name(number: int) -> str:
    """Of a signal. Those for real time have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _failure(error: "_Error") -> Exception:
    """What to raise for an error frame: the message alone where the learner foresaw it, else the traceback too."""
    if error.errno is not None:
        return OSError(error.errno, error.message)
    if error.type == TrainingError.__name__:
        return TrainingError(error.message)
    if error.type == PromptError.__name__:
        return PromptRefused(error.message)
    if error.type in _FORESEEN:
        return LearnerFailed(error.message)
    return LearnerFailed(f"{error.type}: {error.message}\n{error.traceback}")
