"""A person at a terminal, or lines of a pipe: a task is shown, a line is the answer, its score is told."""

import os
from collections.abc import Callable

import trio

from node.contributing.answers import NoAnswer
from node.contributing.desk import Desk, Question
from node.text import clean, printable
from verifiers.sandbox import RIGHT

NAME = "person"

HELP = """\
A line is an answer; a backslash at its end goes on in the next line. A wrong one may be followed by others.
/next    leave this task
/quit    end (so does Ctrl-D)"""

_CHUNK = 2**16


class Lines:
    """Lines of a file descriptor. Waiting for one can be cancelled, which it cannot in Python's own files."""

    def __init__(self, longest: int, descriptor: int = 0) -> None:
        """Of a line beyond so many bytes the beginning is given, one byte longer than that, and the rest left out."""
        self._descriptor = descriptor
        self._longest = longest
        self._buffer = bytearray()
        self._skipping = False
        self._ended = False

    async def next(self) -> bytes | None:
        """The next line without its end; None if there is no more."""
        while True:
            line, found, rest = bytes(self._buffer).partition(b"\n")
            if found:
                self._buffer = bytearray(rest)
                if not self._skipping:
                    return line
                self._skipping = False
            elif self._skipping:
                self._buffer.clear()
            elif len(self._buffer) > self._longest:
                self._skipping = True
                return line[: self._longest + 1]
            elif self._ended:
                self._buffer.clear()
                return line or None
            if self._ended:
                return None
            await self._read()

    async def _read(self) -> None:
        try:
            await trio.lowlevel.wait_readable(self._descriptor)
        except OSError:
            # A file on disk, which is always ready and cannot be waited for; or a descriptor that is closed.
            await trio.lowlevel.checkpoint()
        try:
            data = os.read(self._descriptor, _CHUNK)
        except OSError:
            # The terminal is gone.
            data = b""
        self._buffer += data
        self._ended = not data


class Prompt:
    """Asks a person. `show` gets what is for them, a line or more; `cue` is called when it is their turn; `peers` says
    how many nodes are connected.
    """

    def __init__(
        self,
        desk: Desk,
        lines: Lines,
        show: Callable[[str], None],
        peers: Callable[[], int],
        cue: Callable[[], None] = lambda: None,
    ) -> None:
        self._desk = desk
        self._lines = lines
        self._show = show
        self._peers = peers
        self._cue = cue

    async def run(self, tasks: int | None) -> None:
        """Ask so many tasks, or until the lines end. Raises VerifierError."""
        self._show(HELP)
        number = 0
        while tasks is None or number < tasks:
            if self._desk.full:
                self._show(f"{self._desk.waiting} groups wait for a node to send them to: waiting with them")
                await self._desk.room()
            question = await self._desk.draw()
            number += 1
            self._ask(question, number)
            more = await self._answers(question)
            # A task that was only looked at is the first of the next time.
            if more or question.answers:
                await self._tell(question)
            if not more:
                return

    def _ask(self, question: Question, number: int) -> None:
        task = question.task
        self._show(f"\n--- task {number}: {clean(task.kind)}")
        if task.example is not None:
            self._show(f"Example: {printable(task.example.prompt)}\nAnswer: {printable(task.example.answer)}\n")
        self._show(printable(task.prompt))

    async def _answers(self, question: Question) -> bool:
        """Take answers until one is right, there are L, or the person goes on. Whether there may be another task."""
        while len(question.answers) < self._desk.samples:
            said = await self._said()
            if said is None or said.strip() == b"/quit":
                return False
            word = said.strip()
            if word == b"/next":
                return True
            if not word or word == b"/help":
                self._show(HELP)
                continue
            try:
                reward = await self._desk.answer(question, said)
            except NoAnswer as error:
                self._show(f"no answer: {error}")
                continue
            if reward >= RIGHT:
                self._show("right")
                return True
            left = self._desk.samples - len(question.answers)
            self._show(f"{'wrong' if reward == 0 else f'not quite, {reward:.2f}'}; {left} more tries, or /next")
        return True

    async def _said(self) -> bytes | None:
        """One answer, of one line or more."""
        parts: list[bytes] = []
        self._cue()
        while (line := await self._lines.next()) is not None:
            line = line.removesuffix(b"\r")
            if not line.endswith(b"\\") or sum(map(len, parts)) > 4 * self._desk.longest:
                return b"\n".join([*parts, line])
            parts.append(line[:-1])
        return b"\n".join(parts) if parts else None

    async def _tell(self, question: Question) -> None:
        if await self._desk.finish(question):
            peers = self._peers()
            where = f"to {peers} node{'' if peers == 1 else 's'}" if peers else "as soon as a node is found"
            self._show(f"goes out {where}")
        else:
            self._show("nothing to learn from it, so it is not sent")
