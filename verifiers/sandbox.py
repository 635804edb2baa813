"""The node's side of verification: worker processes that are killed when an answer misbehaves.

Whatever an answer does to a worker, the caller sees a reward of 0 for that answer and the right rewards for all others.
Errors that reach the caller are about tasks and settings: `UnknownTask`, `VerifierError`, and `SandboxError` if workers
cannot run on this machine at all.
"""

import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import trio
from pydantic import Field, TypeAdapter, ValidationError

from verifiers import access
from verifiers.base import MAX_TEXT, Example, NoSuchTask, Task, TaskRef, UnknownTask, VerifierError
from verifiers.codec import FrameError
from verifiers.command import Commands
from verifiers.isolation import OUT_OF_MEMORY, environment
from verifiers.process import Child, spawn
from verifiers.registry import COMMAND
from verifiers.scratch import scratch_directory
from verifiers.settings import VerifierSettings

START_SECONDS = 60.0
"""Limit on starting a worker and on importing a verifier, which on a busy small machine takes several seconds."""

MAX_COMPLETION = 2**18
"""Characters in a completion that is scored; a longer one scores 0."""

RIGHT = 1 - 1e-9
"""A score from here on is right where rewards are 0 or 1. Some scorers compute it in floating point."""

_ATTEMPTS = 2
"""A worker that ends for no visible reason may have been killed from outside, and others with it; one that runs out of
memory may have kept it from earlier work. So what it was doing is tried once more, by a worker started for it."""

_OVERSLEPT = 1.0
"""Seconds past a deadline from which on it was this process that stood still (stopped, or on a machine that slept), and
not the worker, whose reply may be there already."""

_QUOTED_LOG, _QUOTED_ERROR = 600, 2000

_REPORTED = {"NoSuchTask": NoSuchTask, "UnknownTask": UnknownTask}
"""What a worker names, beside VerifierError itself."""

# What a worker may say. An answer that has taken it over says anything, and what is taken goes on to the learner, the
# pool and the log: so types and lengths are checked.
_Text = Annotated[str, Field(max_length=MAX_TEXT)]
_Word = Annotated[str, Field(max_length=256)]
_HELLO: TypeAdapter[tuple[Literal["hello"], dict[_Word, bool]]] = TypeAdapter(
    tuple[Literal["hello"], Annotated[dict[_Word, bool], Field(max_length=64)]]
)
_REPLY: TypeAdapter[list[Any]] = TypeAdapter(Annotated[list[Any], Field(min_length=2)])
_ONE: TypeAdapter[tuple[Any]] = TypeAdapter(tuple[Any])
_ERROR: TypeAdapter[tuple[str, str]] = TypeAdapter(tuple[_Word, _Text])
_CANONICAL: TypeAdapter[tuple[str, str]] = TypeAdapter(tuple[_Word, _Text])
_MADE: TypeAdapter[tuple[str, str, str | None, tuple[str, str] | None]] = TypeAdapter(
    tuple[_Word, _Text, _Text | None, tuple[_Text, _Text] | None]
)
_REWARD: TypeAdapter[tuple[float, str]] = TypeAdapter(
    tuple[Annotated[float, Field(ge=0, le=1)], Literal["scored", "refused", "raised"]]
)

T = TypeVar("T")


class SandboxError(VerifierError):
    """Workers cannot be started on this machine."""


class WorkerLost(Exception):
    """The worker ended, hung or left the protocol: `outcome` is `crashed`, `timeout` or `memory`."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome


class Worker:
    """One worker process and the conversation with it. `busy` from a request's first byte to its final reply."""

    def __init__(
        self, child: Child, settings: VerifierSettings, readable: Sequence[str], private: Sequence[str]
    ) -> None:
        self._child = child
        self._settings = settings
        self._private = private
        self.readable = frozenset(readable)
        self._number = 0
        self._loaded: set[str] = set()
        self.told: set[int] = set()
        self.busy = False
        self.isolation: dict[str, bool] | None = None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._child.running

    async def start(self) -> None:
        """Wait until it serves. Raises WorkerLost if it never does."""
        if self.isolation is None:
            self.busy = True
            await self._send(
                [self._settings.options, self._settings.memory_mb, sorted(self.readable), list(self._private)]
            )
            _, self.isolation = self.checked(_HELLO, await self._frame(START_SECONDS))
            self.busy = False

    async def load(self, verifier: str) -> None:
        """Import a verifier there, once."""
        if verifier not in self._loaded:
            await self.call("load", verifier, seconds=START_SECONDS)
            self._loaded.add(verifier)

    async def call(self, operation: str, *arguments: Any, seconds: float) -> Any:
        """One request with one reply. Raises what the worker reports, or WorkerLost."""
        await self.request(operation, *arguments)
        (value,) = self.checked(_ONE, await self.reply("ok", seconds))
        return value

    async def request(self, operation: str, *arguments: Any) -> None:
        """Send a request whose replies are then read one by one. Raises WorkerLost if there is a reply already."""
        self.busy = True
        if self._child.frames.pending:
            raise WorkerLost("crashed", "it replied to a request before that was made")
        self._number += 1
        await self._send([self._number, operation, *arguments])

    async def reply(self, kind: str, seconds: float) -> Any:
        """The values of the next reply to the last request, which has to be of this kind."""
        number, got, *values = self.checked(_REPLY, await self._frame(seconds))
        if number != self._number:
            raise WorkerLost("crashed", "it answered a request that was not asked")
        if got == "error":
            name, told = self.checked(_ERROR, values)
            self.busy = False
            raise _REPORTED.get(name, VerifierError)(told[:_QUOTED_ERROR])
        if got != kind:
            raise WorkerLost("crashed", f"it replied something else than {kind!r}")
        self.busy = got != "ok"
        return values

    def checked(self, adapter: TypeAdapter[T], value: Any) -> T:
        """`value`, if it is what it should be. Raises WorkerLost, and the worker is not to be used again.

        Nothing of what is wrong is quoted: it may be as long, or as deep, as a frame allows.
        """
        try:
            return adapter.validate_python(value)
        except ValidationError:
            self.busy = True
            raise WorkerLost("crashed", "it sent values of the wrong type") from None

    async def kill(self) -> int:
        """End it, whatever it is doing. Returns its exit status."""
        return await self._child.kill()

    async def _send(self, value: Any) -> None:
        try:
            await self._child.frames.send(value)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise await self._lost() from error
        except FrameError as error:
            # Nothing was sent: what was asked for does not fit a frame.
            self.busy = False
            raise VerifierError(f"too much for one request to the sandbox: {error}") from error

    async def _frame(self, seconds: float) -> Any:
        try:
            return await self._awaited(seconds)
        except EOFError as error:
            raise await self._lost() from error
        except FrameError as error:
            raise WorkerLost("crashed", f"it sent something else than a frame: {error}") from error

    async def _awaited(self, seconds: float) -> Any:
        """The next frame. Raises WorkerLost if it does not come in time, or what `FrameStream.receive` raises."""
        while True:
            with trio.move_on_after(seconds) as scope:
                return await self._child.frames.receive()
            if trio.current_time() - scope.deadline < _OVERSLEPT:
                raise WorkerLost("timeout", f"no reply within {seconds:g} s")

    async def _lost(self) -> WorkerLost:
        self.busy = True
        status = await self._child.kill()
        return WorkerLost(*_ended(status))


class Sandbox:
    """Makes tasks and scores answers in a pool of workers. Open it with `open_sandbox`.

    `outcomes` counts the answers that got a reward, by how: `scored`, `refused` (outside the grammar or too long),
    `raised` (the scorer failed), `timeout`, `memory`, `crashed`; all but the first are a reward of 0. `restarts` counts
    workers that had to be replaced.
    """

    def __init__(self, settings: VerifierSettings, directory: Path, private: Sequence[Path] = ()) -> None:
        self._settings = settings
        self._directory = directory
        self._private = [str(path) for path in (*private, *access.secrets())]
        self._readable = set(access.named(settings.options))
        self._log = directory / "worker.log"
        self._workers: dict[int, Worker | None] = {slot: self._spawn() for slot in range(settings.workers)}
        self._put, self._free = trio.open_memory_channel[int](settings.workers)
        for slot in self._workers:
            self._put.send_nowait(slot)
        self._commands = Commands(settings, directory, self._private)
        self._told: list[tuple[str, dict[str, Any]]] = []
        self.outcomes: Counter[str] = Counter()
        self.restarts = 0
        self._isolation: Mapping[str, bool] = {}

    @property
    def isolation(self) -> Mapping[str, bool]:
        """What the system let be limited, of the workers and of the programs that have been started, by name."""
        return {**self._isolation, **self._commands.isolation}

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [worker.pid for worker in self._workers.values() if worker is not None]

    async def ready(self) -> None:
        """Wait until every worker serves; `isolation` knows them then. Raises SandboxError if one cannot start."""
        for _ in self._workers:
            slot = await self._free.receive()
            try:
                await self._started(slot)
            finally:
                self._put.send_nowait(slot)

    async def canonical(self, verifier: str, config: Mapping[str, Any]) -> tuple[str, str]:
        """(version, canonical configuration) of an entry of this node's own task mix.

        Never call it with a peer's configuration, which may name a file to read: `make` takes those, and accepts
        canonical ones only. Raises UnknownTask or VerifierError.
        """
        if verifier == COMMAND:
            return self._commands.canonical(config)
        told = (verifier, dict(config))
        # What a worker may read is fixed when it starts, so one that is there may have to make way.
        self._readable.update(access.named(config))
        try:
            async with self._worker(verifier) as worker:
                answer = worker.checked(_CANONICAL, await worker.call("canonical", *told, seconds=START_SECONDS))
        except WorkerLost as error:
            raise VerifierError(f"this task configuration cannot be used: {error}") from error
        if told not in self._told:
            self._told.append(told)
        return answer

    async def make(self, ref: TaskRef) -> Task:
        """The task that `ref` names. Raises UnknownTask, NoSuchTask, or VerifierError if making it fails or takes too
        long."""
        ref.check_range()
        if ref.verifier == COMMAND:
            return await self._commands.make(ref)
        for attempt in range(_ATTEMPTS):
            try:
                async with self._worker(ref.verifier, fresh=attempt > 0) as worker:
                    value = await worker.call("make", _listed(ref), seconds=self._settings.answer_seconds)
                    kind, prompt, answer, example = worker.checked(_MADE, value)
                return Task(ref, kind, prompt, answer, Example(*example) if example else None)
            except WorkerLost as error:
                if error.outcome == "timeout" or attempt + 1 == _ATTEMPTS:
                    raise VerifierError(f"the task cannot be made: {error} ({ref})") from error
        raise AssertionError("the last attempt returns or raises")

    async def score(self, task: Task, completions: Sequence[str]) -> list[float]:
        """A reward in [0, 1] for each completion, in order. 0 or 1 unless the settings say `graded`.

        Raises UnknownTask or VerifierError only where the task itself cannot be made again.
        """
        task.ref.check_range()
        outcomes: Counter[str] = Counter()
        fitting = [number for number, completion in enumerate(completions) if len(completion) <= MAX_COMPLETION]
        if len(fitting) < len(completions):
            outcomes["refused"] += len(completions) - len(fitting)
        # Text with lone surrogates cannot travel as UTF-8.
        texts = [completions[number].encode("utf-8", "replace").decode() for number in fitting]
        if task.ref.verifier == COMMAND:
            scores = await self._commands.score(task, texts, outcomes)
        else:
            scores = await self._score(task.ref, texts, outcomes)
        self.outcomes.update(outcomes)
        rewards = [0.0] * len(completions)
        for number, score in zip(fitting, scores, strict=True):
            rewards[number] = score if self._settings.graded else float(score >= RIGHT)
        return rewards

    async def _score(self, ref: TaskRef, texts: Sequence[str], outcomes: Counter[str]) -> list[float]:
        scores: list[float] = []
        tried = Counter[int]()
        while len(scores) < len(texts):
            place = len(scores)
            try:
                await self._score_rest(ref, texts, scores, outcomes, fresh=tried[place] > 0)
            except WorkerLost as error:
                if len(scores) == len(texts):
                    # Lost after the last answer, which has its score.
                    break
                tried[len(scores)] += 1
                if error.outcome != "timeout" and tried[len(scores)] < _ATTEMPTS:
                    continue
                if len(scores) == place and isinstance(error, MakingLost):
                    raise VerifierError(f"the task cannot be made: {error} ({ref})") from error
                outcomes[error.outcome] += 1
                scores.append(0.0)
        return scores

    async def _score_rest(
        self, ref: TaskRef, texts: Sequence[str], scores: list[float], outcomes: Counter[str], *, fresh: bool
    ) -> None:
        """Append the scores of the texts that have none yet. Raises WorkerLost at the one that ended the worker."""
        async with self._worker(ref.verifier, fresh=fresh) as worker:
            await worker.request("score", _listed(ref), list(texts[len(scores) :]))
            try:
                await worker.reply("ready", self._settings.answer_seconds)
            except WorkerLost as error:
                raise MakingLost(error.outcome, str(error)) from error
            while len(scores) < len(texts):
                reply = await worker.reply("reward", self._settings.answer_seconds)
                score, outcome = worker.checked(_REWARD, reply)
                outcomes[outcome] += 1
                scores.append(score)
            await worker.reply("ok", self._settings.answer_seconds)

    @asynccontextmanager
    async def _worker(self, verifier: str, *, fresh: bool = False) -> AsyncIterator[Worker]:
        """A worker that has the verifier, for one conversation. One that is left in the middle of it is killed.

        `fresh` asks for one that was started for this conversation.
        """
        slot = await self._free.receive()
        try:
            if fresh:
                await self._discard(slot)
            worker = await self._started(slot, verifier)
            try:
                yield worker
            finally:
                if worker.busy:
                    await self._discard(slot)
        finally:
            self._put.send_nowait(slot)

    async def _started(self, slot: int, verifier: str | None = None) -> Worker:
        """The worker of a slot, started if there is none. Raises SandboxError if it cannot serve."""
        for attempt in range(_ATTEMPTS):
            present = self._workers[slot]
            if present is not None and not present.alive:
                await self._discard(slot)
            elif present is not None and not self._readable <= present.readable:
                self._workers[slot] = None
                await present.kill()
            present = self._workers[slot]
            worker = self._workers[slot] = present or self._spawn()
            try:
                await worker.start()
                if verifier is not None:
                    await self._prepare(worker, verifier)
            except WorkerLost as error:
                if error.outcome == "timeout" or attempt + 1 == _ATTEMPTS:
                    raise SandboxError(self._complaint(error)) from error
            else:
                self._isolation = worker.isolation or {}
                return worker
            finally:
                if worker.busy:
                    await self._discard(slot)
        raise AssertionError("the last attempt returns or raises")

    async def _prepare(self, worker: Worker, verifier: str) -> None:
        """Load the verifier there, and tell it what others were told: some know files only from configurations."""
        await worker.load(verifier)
        for number, (known, config) in enumerate(self._told):
            if known == verifier and number not in worker.told:
                await worker.call("canonical", known, config, seconds=START_SECONDS)
                worker.told.add(number)

    def _complaint(self, error: WorkerLost) -> str:
        said = self._log.read_text(errors="replace")[-_QUOTED_LOG:].strip()
        memory = self._settings.memory_mb
        return f"the verifier sandbox cannot start with [verifiers] memory_mb = {memory}: {error}. {said}"

    async def _discard(self, slot: int) -> None:
        worker, self._workers[slot] = self._workers[slot], None
        if worker is not None:
            self.restarts += 1
            await worker.kill()

    def _spawn(self) -> Worker:
        home, cache = str(self._directory / "empty"), str(self._directory / "cache")
        with self._log.open("wb") as log:
            env = environment(os.environ, home, cache)
            child = spawn("verifiers.worker", env=env, cwd=home, stderr=log.fileno())
        return Worker(child, self._settings, sorted(self._readable), self._private)

    async def _aclose(self) -> None:
        with trio.CancelScope(shield=True):
            for slot, worker in self._workers.items():
                self._workers[slot] = None
                if worker is not None:
                    await worker.kill()
            await self._commands.aclose()


class MakingLost(WorkerLost):
    """The worker was lost over the task, before the first answer."""


@asynccontextmanager
async def open_sandbox(settings: VerifierSettings, private: Sequence[Path]) -> AsyncIterator[Sandbox]:
    """A sandbox whose workers have ended when the block has. They start in the background; `ready` waits for them.

    Nothing at or below the paths `private` can be read in it, unless the settings name it.
    """
    with scratch_directory() as directory:
        (directory / "empty").mkdir(mode=0o500)
        (directory / "cache").mkdir()
        sandbox = Sandbox(settings, directory, private)
        try:
            yield sandbox
        finally:
            await sandbox._aclose()


def _ended(status: int) -> tuple[str, str]:
    if status == OUT_OF_MEMORY:
        return "memory", "it ran out of memory"
    return "crashed", f"it ended with status {status}"


def _listed(ref: TaskRef) -> list[Any]:
    return [ref.verifier, ref.version, ref.config, ref.seed, ref.index]
