"""Answers of a program: started once for each answer, with the task on its standard input."""

import json
import os
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass

import trio

from node.contributing.answers import NoAnswer
from node.errors import NodeError
from node.text import clean
from verifiers.base import Task

_CHUNK = 2**16
_QUOTED = 300
"""Characters of what a program says on stderr that are repeated."""


class CommandError(NodeError):
    """The program cannot be run at all."""

    exit_status = 2


@dataclass(frozen=True)
class CommandSource:
    """`line` is split as a shell does, and no shell is used. `as_json`: one JSON object instead of the question alone.

    An answer may take `seconds`, and have `longest` characters. The number of the answer is in `SWARMNODE_SAMPLE`.
    """

    line: str
    seconds: float
    longest: int
    as_json: bool = False

    @property
    def name(self) -> str:
        """See `node.contributing.asking.Source`."""
        return "command"

    def check(self) -> None:
        """Raises CommandError if there can be no such program."""
        program = self._argv()[0]
        if shutil.which(program) is None:
            raise CommandError(f"there is no program {program} that may be run: --command begins with one")

    def _argv(self) -> list[str]:
        """The program and its arguments. Raises CommandError."""
        try:
            words = shlex.split(self.line)
        except ValueError as error:
            raise CommandError(f"--command {self.line!r} cannot be split into words: {error}") from error
        if not words or "\0" in self.line:
            raise CommandError("--command must name a program")
        return words

    async def answer(self, task: Task, sample: int) -> tuple[bytes, bool]:
        """See `node.contributing.asking.Source`. Raises CommandError if the program cannot be started."""
        argv = self._argv()
        try:
            process = await trio.lowlevel.open_process(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "SWARMNODE_SAMPLE": str(sample), "SWARMNODE_KIND": task.kind},
                start_new_session=True,
            )
        except OSError as error:
            raise CommandError(f"{argv[0]} cannot be started: {error.strerror or error}") from error
        try:
            with trio.fail_after(self.seconds):
                return await self._spoken(process, self._input(task, sample)), True
        except trio.TooSlowError as error:
            raise NoAnswer(f"the program took longer than {self.seconds:g} s (--timeout)") from error
        finally:
            # With all that it has started, and also when it is done: nothing is to go on after its answer.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with trio.CancelScope(shield=True):
                await process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with trio.CancelScope(shield=True):
                        await trio.aclose_forcefully(stream)

    def _input(self, task: Task, sample: int) -> bytes:
        if not self.as_json:
            return f"{task.prompt}\n".encode()
        shown = task.example
        example = None if shown is None else {"prompt": shown.prompt, "answer": shown.answer}
        return (
            json.dumps(
                {"kind": task.kind, "prompt": task.prompt, "example": example, "sample": sample}, ensure_ascii=False
            ).encode()
            + b"\n"
        )

    async def _spoken(self, process: trio.Process, told: bytes) -> bytes:
        """What it prints until it ends. Raises NoAnswer if that is too much, or it ends badly."""
        said, complained = bytearray(), bytearray()
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        # A character has up to four bytes; whatever is beyond is not read.
        most = 4 * self.longest + _CHUNK

        async def feed(stdin: trio.abc.SendStream) -> None:
            # It need not read what it knows.
            with suppress(trio.BrokenResourceError):
                await stdin.send_all(told)
            await stdin.aclose()

        async def drain(stream: trio.abc.ReceiveStream) -> None:
            while data := await stream.receive_some(_CHUNK):
                complained[:] = (complained + data)[-4 * _QUOTED :]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(feed, process.stdin)
            nursery.start_soon(drain, process.stderr)
            while len(said) < most and (data := await process.stdout.receive_some(_CHUNK)):
                said += data
            if len(said) >= most:
                nursery.cancel_scope.cancel()
        if len(said) >= most:
            raise NoAnswer(f"the program printed more than {self.longest} characters")
        status = await process.wait()
        if status != 0:
            why = clean(complained.decode(errors="replace"))[-_QUOTED:]
            raise NoAnswer(f"the program ended with status {status}" + (f": {why}" if why else ""))
        return bytes(said)
