"""The verifier `command`: tasks and scores from a program of this node's owner, over JSON lines (docs/verifiers.md).

The program comes from this node's own configuration, never from a peer; a peer can only choose the parameters it is
asked with. It runs beside the sandbox, not in it, because it may need another environment's packages, processes or, if
its settings say so, a network or a GPU; `verifiers.confined` sees to it that it has no more than that. It is started
when first needed, asked one thing at a time, and killed when it dies, hangs or babbles. On Linux the kernel kills it
when the node is killed.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import trio
from trio.lowlevel import FdStream

from verifiers import access, confined, launch
from verifiers.base import MAX_TEXT, Task, TaskRef, UnknownTask, VerifierError, canonical_json, extract_answer, is_text
from verifiers.confined import Policy
from verifiers.process import Group, readable
from verifiers.registry import unknown
from verifiers.settings import WRITE, CommandSettings, VerifierSettings

MAX_LINE = 2**20
"""Bytes in one line of the program's output."""

START_SECONDS = 60.0
"""Limit on the first reply after a start, which has the program's imports in it."""

_MAX_LOG = 2**20
_QUOTED_LOG = 600

_PASSED = (
    *("CUDA_VISIBLE_DEVICES", "HF_HOME", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "TMPDIR"),
    *("TZ", "USER", "XDG_CACHE_HOME"),
)
"""Variables of the node that the program gets. Others, which may hold keys, are given by `env NAME=... program`."""

_REFUSALS = (
    "MemoryError",
    "not permitted",
    "ermission denied",
    "ead-only file system",
    "unreachable",
    "PermissionError",
)
"""What programs say who were refused what they are not known to need."""

T = TypeVar("T")


class ProgramLost(VerifierError):
    """The program ended, or did not answer in time."""

    def __init__(self, message: str, outcome: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class Commands:
    """All programs of [verifiers.commands]. `directory` takes what they write to standard error and their folders."""

    def __init__(self, settings: VerifierSettings, directory: Path, private: Sequence[str]) -> None:
        self._settings = settings.commands
        self._programs = {
            name: Program(name, command, settings, directory / str(number), private)
            for number, (name, command) in enumerate(settings.commands.items())
        }

    @property
    def isolation(self) -> dict[str, bool]:
        """What the system let be limited of all confined programs that have been started, by name."""
        got: dict[str, bool] = {}
        for program in self._programs.values():
            for name, done in program.isolation.items():
                got[f"program {name}"] = got.get(f"program {name}", True) and done
        return got

    def canonical(self, config: Mapping[str, Any]) -> tuple[str, str]:
        """(version, canonical configuration). The program judges the parameters when it makes the task."""
        name = config.get("name")
        if not isinstance(name, str):
            raise VerifierError("a command task needs name = NAME, a program of [verifiers.commands.NAME]")
        return self._known(name).version, canonical_json(config)

    async def make(self, ref: TaskRef) -> Task:
        """The task that the program makes of `ref`."""
        name, params = self._read(ref)
        reply = await self._programs[name].ask({"op": "make", **params}, _made)
        return Task(ref=ref, kind=name, prompt=reply[0], answer=reply[1])

    async def score(self, task: Task, completions: Sequence[str], outcomes: Counter[str]) -> list[float]:
        """A score in [0, 1] for each completion. One over which the program dies or hangs scores 0."""
        name, params = self._read(task.ref)
        scores = []
        for completion in completions:
            question = {"op": "score", **params, "prompt": task.prompt, "answer": extract_answer(completion)}
            try:
                scores.append(await self._programs[name].ask(question, _scored))
                outcomes["scored"] += 1
            except ProgramLost as error:
                scores.append(0.0)
                outcomes[error.outcome] += 1
        return scores

    async def aclose(self) -> None:
        """End all programs."""
        for program in self._programs.values():
            await program.kill()

    def _known(self, name: str) -> CommandSettings:
        if name not in self._settings:
            raise UnknownTask(unknown("command (see [verifiers.commands])", name, self._settings))
        return self._settings[name]

    def _read(self, ref: TaskRef) -> tuple[str, dict[str, Any]]:
        try:
            config = json.loads(ref.config)
        except (ValueError, RecursionError) as error:
            raise VerifierError(f"this task configuration is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise VerifierError("this task configuration is not a JSON object")
        version, canonical = self.canonical(config)
        if canonical != ref.config:
            raise VerifierError(f"not the canonical spelling of this task configuration: {ref.config}")
        if version != ref.version:
            raise UnknownTask(f"made with version {ref.version} of {config['name']!r}, this node has {version}")
        name = config.pop("name")
        return name, {"config": config, "seed": ref.seed, "index": ref.index}


class _Running(Group):
    """A program that was started, and its pipes."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], stderr: int, policy: Policy | None) -> None:
        """Raises OSError. Synchronous, and to be called by the main thread, for the reason given in `process.spawn`."""
        launcher = (
            ["-I", "-S", launch.__file__, str(os.getpid())]
            if policy is None
            else ["-I", confined.__file__, str(policy)]
        )
        process = subprocess.Popen(
            [sys.executable, *launcher, *argv],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            pass_fds=() if policy is None else (policy.report,),
            start_new_session=True,
        )
        super().__init__(process)
        assert process.stdin is not None
        assert process.stdout is not None
        # The streams get descriptors of their own, which they close; these go with the objects that subprocess made.
        self.stdin, self.stdout = FdStream(os.dup(process.stdin.fileno())), FdStream(os.dup(process.stdout.fileno()))
        process.stdin.close()
        process.stdout.close()

    async def kill(self) -> int:
        """Close the pipes too."""
        status = await super().kill()
        with trio.CancelScope(shield=True):
            await self.stdin.aclose()
            await self.stdout.aclose()
        return status


class Program:
    """One external program and the conversation with it."""

    def __init__(
        self, name: str, command: CommandSettings, settings: VerifierSettings, place: Path, private: Sequence[str]
    ) -> None:
        """`place`: where its log (with the suffix .log) and its folder for temporary files are made."""
        self._name = name
        self._argv = list(command.argv)
        self._needs = command.needs
        self._settings = settings
        self._seconds = settings.answer_seconds
        self._log = place.with_suffix(".log")
        self._scratch = place
        self._private = private
        self._report: int | None = None
        self.isolation: dict[str, bool] = {}
        self._lock = trio.Lock()
        self._process: _Running | None = None
        self._unread = bytearray()

    async def ask(self, question: Mapping[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        """Send one line, return what `read` makes of the line that comes back.

        A program that ended is started once more and asked again. Raises ProgramLost if that does not help or it was
        silent too long, VerifierError if it cannot start, answers nonsense or reports an error.
        """
        async with self._lock:
            try:
                return await self._ask(question, read)
            except ProgramLost as error:
                if error.outcome != "crashed":
                    raise
                return await self._ask(question, read)

    async def kill(self) -> None:
        """End the program and everything in its process group."""
        process, self._process = self._process, None
        self._unread.clear()
        self._read_report()
        if process is not None:
            await process.kill()
        # Without a file system of its own it wrote to the node's.
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(lambda: shutil.rmtree(self._scratch, ignore_errors=True))

    async def _ask(self, question: Mapping[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        fresh = self._process is None
        answered = False
        try:
            process = self._process or self._start()
            with trio.move_on_after(START_SECONDS if fresh else self._seconds) as clock:
                line = await self._exchange(process, json.dumps(question).encode() + b"\n")
            if clock.cancelled_caught:
                raise ProgramLost(self._complaint("did not answer in time"), "timeout")
            reply = self._decode(line)
            self._read_report()
            answered = True
        finally:
            # A cancelled or broken exchange leaves an answer in the pipe that would pass for the next one's.
            if not answered:
                await self.kill()
        return self._taken(line, reply, read)

    def _taken(self, line: bytes, reply: dict[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        try:
            if "error" not in reply:
                return read(reply)
            told = _text(reply["error"])
        except (KeyError, TypeError, ValueError) as error:
            raise VerifierError(self._complaint(f"answered {line[:200]!r}, which is not a reply: {error}")) from error
        raise VerifierError(f"the program of [verifiers.commands.{self._name}] says: {told[:_QUOTED_LOG]}")

    def _start(self) -> _Running:
        environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
        if shutil.which(self._argv[0], path=environment.get("PATH", os.defpath)) is None:
            raise VerifierError(
                f"[verifiers.commands.{self._name}] argv cannot be started: no program {self._argv[0]!r}, or not "
                "executable; give its path in full"
            )
        self._log.write_bytes(b"")
        policy, written = None, None
        try:
            if "everything" not in self._needs:
                self._scratch.mkdir(mode=0o700, exist_ok=True)
                environment["TMPDIR"] = str(self._scratch)
                self._report, written = os.pipe()
                policy = self._policy(written, environment.get("PATH", os.defpath))
            # Appending: the file is emptied under the program's hands when it gets long.
            with self._log.open("ab") as log:
                self._process = _Running(self._argv, environment, log.fileno(), policy)
        except OSError as error:
            raise VerifierError(f"[verifiers.commands.{self._name}] cannot be started: {error}") from error
        finally:
            if written is not None:
                os.close(written)
        return self._process

    def _policy(self, report: int, path: str) -> Policy:
        paths = [os.path.expanduser(need) for need in self._needs if os.path.isabs(os.path.expanduser(need))]
        write = [os.path.expanduser(need.removeprefix(WRITE)) for need in self._needs if need.startswith(WRITE)]
        return Policy(
            parent=os.getpid(),
            report=report,
            scratch=str(self._scratch),
            read=[*access.belongings(self._argv, path), *paths],
            write=[path for path in write if os.path.exists(path)],
            private=list(self._private),
            network="network" in self._needs,
            devices="devices" in self._needs,
            memory_mb=self._settings.memory_mb,
            disk_mb=self._settings.disk_mb,
        )

    def _read_report(self) -> None:
        """What the launcher says of the confinement, which it has written when the program begins."""
        number, self._report = self._report, None
        if number is not None:
            os.set_blocking(number, False)
            with suppress(BlockingIOError):
                self.isolation = json.loads(os.read(number, 4096) or b"{}")
            os.close(number)

    async def _exchange(self, process: _Running, line: bytes) -> bytes:
        if self._unread or readable(process.stdout.fileno()):
            raise VerifierError(self._complaint("wrote more than one line for the request before"))
        try:
            await process.stdin.send_all(line)
            while b"\n" not in self._unread:
                piece = await process.stdout.receive_some(2**16)
                if not piece:
                    raise ProgramLost(self._complaint("ended"), "crashed")
                self._unread += piece
                if len(self._unread) > MAX_LINE:
                    raise VerifierError(self._complaint(f"wrote more than {MAX_LINE} bytes in one line"))
        except trio.BrokenResourceError as error:
            raise ProgramLost(self._complaint("ended"), "crashed") from error
        reply, _, rest = bytes(self._unread).partition(b"\n")
        self._unread = bytearray(rest)
        return reply

    def _decode(self, line: bytes) -> dict[str, Any]:
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise VerifierError(self._complaint(f"wrote {line[:200]!r}, which is not a line of JSON")) from error
        if not isinstance(reply, dict):
            raise VerifierError(self._complaint(f"wrote {line[:200]!r}, which is not a JSON object"))
        if self._log.stat().st_size > _MAX_LOG:
            os.truncate(self._log, 0)
        return reply

    def _complaint(self, what: str) -> str:
        said = self._log.read_bytes()[-_QUOTED_LOG:].decode("utf-8", "replace").strip()
        tail = f"; its standard error ends: {said}" if said else ""
        if any(hint in said for hint in _REFUSALS) and "everything" not in self._needs:
            tail += f" ([verifiers.commands.{self._name}] needs says what it may use)"
        return f"the program of [verifiers.commands.{self._name}] ({self._argv[0]}) {what}{tail}"


def _made(reply: dict[str, Any]) -> tuple[str, str | None]:
    prompt, answer = reply["prompt"], reply["answer"]
    return _text(prompt), None if answer is None else _text(answer)


def _text(value: Any) -> str:
    if not is_text(value) or len(value) > MAX_TEXT:
        raise ValueError(f"prompt and error must be text, answer text or null, of at most {MAX_TEXT} characters")
    return value


def _scored(reply: dict[str, Any]) -> float:
    reward = reply["reward"]
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not 0 <= reward <= 1:
        raise ValueError("reward must be a number from 0 to 1")
    return float(reward)
