"""What a learner process says."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

import trio
from trio.testing import MockClock

from node.learner import LearnerDied, LearnerFailed, LearnerProcess
from rl.errors import TrainingError
from rl.learner_child import CHAT_ANSWER, ROLLOUTS, STATS
from rl.rollouts import ChatAnswer, Completion, RolloutGroup, Sampling, UpdateStats
from rl.settings import LearnerSettings
from tests.fuzz.scratch import Child, joined
from verifiers.base import Task, TaskRef
from verifiers.codec import pack
from verifiers.process import Child as RealChild

TASK = Task(TaskRef("fake", "1", "{}", 1, 1), "kind", "question", "answer")
GROUP = RolloutGroup(TASK, (Completion("a", True, (1,), (-0.5,)), Completion("b", False)), 3)


def seeds() -> list[bytes]:
    stats = UpdateStats(1, 10, 0.5, 0.0, 1.0, 0.1, 0.0, 1e-5, None, 4096)
    answer = ChatAnswer("hi", True, 1, 2, 100, 3)
    error = {"type": "TrainingError", "message": "not a number", "traceback": "...", "errno": None}
    ready: Any = {"ready": {"model": "tiny", "public_name": "tiny", "device": "cpu"}}
    talks: list[list[Any]] = [
        [
            ready,
            {"id": 1, "progress": [1, 2, "tokens"]},
            {"id": 1, "busy": True},
            {"id": 1, "ok": True, "result": ROLLOUTS.dump_python([GROUP])},
            {"id": 2, "ok": True, "result": [True]},
            {"id": 3, "ok": True, "result": STATS.dump_python(stats)},
            {"id": 4, "text": "h"},
            {"id": 4, "ok": True, "result": CHAT_ANSWER.dump_python(answer)},
        ],
        [ready, {"id": 1, "ok": False, "error": error}, {"id": 2, "ok": False, "error": {**error, "errno": 28}}],
        [{"error": error}],
    ]
    return [joined([pack(value) for value in talk]) for talk in talks]


def run(data: bytes) -> None:
    trio.run(_talk, data, clock=MockClock(autojump_threshold=0))


async def _talk(data: bytes) -> None:
    progress: list[tuple[int, int, str]] = []
    learner = LearnerProcess(cast(RealChild, Child(data)), lambda *told: progress.append(told))
    learner.log_ended.set()
    texts: list[str] = []
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: learner.start(LearnerSettings(), None),
        lambda: learner.generate([TASK], Sampling(2, 5), 1),
        lambda: learner.fits([]),
        lambda: learner.update([], 1),
        lambda: learner.chat([{"role": "user", "content": "hello"}], Sampling(1, 5), 1, texts.append),
    ]
    for call in calls:
        try:
            await call()
        except (LearnerFailed, TrainingError, OSError):
            continue
        except LearnerDied:
            break
    told: list[object] = [*texts, *(unit for _, _, unit in progress)]
    assert all(isinstance(text, str) for text in told)
