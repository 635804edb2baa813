"""What a sandbox worker says: an answer that has taken it over can make it say anything."""

from typing import Any, cast

import trio
from trio.testing import MockClock

from tests.fuzz.scratch import Child, directory, joined
from verifiers.base import TaskRef, VerifierError
from verifiers.codec import pack
from verifiers.process import Child as RealChild
from verifiers.sandbox import MAX_COMPLETION, Sandbox, Worker
from verifiers.settings import VerifierSettings

DIRECTORY = directory()
REF = TaskRef("fake", "1", "{}", 1, 1)
HELLO = ["hello", {"seccomp": True}]


def seeds() -> list[bytes]:
    made: list[Any] = [2, "ok", ["kind", "question", "answer", ["a question", "its answer"]]]
    scored: list[Any] = [[3, "ready"], [3, "reward", 1.0, "scored"], [3, "reward", 0.0, "refused"], [3, "ok", None]]
    loaded: list[Any] = [1, "ok", None]
    refused: list[Any] = [2, "error", "NoSuchTask", "there is none"]
    talks = [[HELLO, loaded, made, *scored], [HELLO, loaded, refused, HELLO, loaded, made]]
    return [joined([pack(value) for value in talk]) for talk in talks]


class _Scripted(Sandbox):
    """All its workers, one after the other, read on in the same talk."""

    def __init__(self, data: bytes) -> None:
        self._child = Child(data)
        super().__init__(VerifierSettings(workers=1), DIRECTORY)
        self._log.touch()

    def _spawn(self) -> Worker:
        return Worker(cast(RealChild, self._child), self._settings, [], [])


def run(data: bytes) -> None:
    trio.run(_talk, data, clock=MockClock(autojump_threshold=0))


async def _talk(data: bytes) -> None:
    sandbox = _Scripted(data)
    try:
        task = await sandbox.make(REF)
    except VerifierError as error:
        assert len(str(error)) < 5000
        return
    texts = [text for text in (task.prompt, task.kind, task.answer) if text is not None]
    assert max(map(len, texts)) <= MAX_COMPLETION
    # What travels on to the learner and the pool.
    pack([task.kind, task.prompt, task.answer])
    try:
        rewards = await sandbox.score(task, ["one", "two"])
    except VerifierError as error:
        assert len(str(error)) < 5000
        return
    assert len(rewards) == 2
    assert set(rewards) <= {0.0, 1.0}
