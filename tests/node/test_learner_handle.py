"""The node's end of the learner, against the real process with the tiny model."""

import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from node import learner as learner_module
from node.learner import LearnerDied, LearnerFailed, LearnerProcess, Progress, open_learner
from rl.advantage import advantages
from rl.rollouts import RolloutGroup, Sampling, ScoredGroup
from rl.settings import LearnerSettings
from verifiers.base import Task, TaskRef

pytestmark = pytest.mark.slow

TASKS = [Task(TaskRef("t", "1", "{}", 0, i), "sum", f"{i} + 1?", None) for i in range(2)]
# Seconds of work, of which the first is told after a tenth of one.
MANY = [Task(TaskRef("t", "1", "{}", 0, i), "sum", f"{i} + 1?", None) for i in range(100)]
LARGE = Sampling(64, 64)


def silent(done: int, total: int, unit: str) -> None:
    pass


@asynccontextmanager
async def started(progress: Progress = silent, patience: float = 300) -> AsyncIterator[LearnerProcess]:
    settings = LearnerSettings.model_validate(
        {"model": {"name": "tiny", "device": "cpu"}, "lora": {"rank": 0}, "prompt": {"system": "", "shots": 0},
         "threads": 1, "training": {"lr": 1e-3}, "engine": {"patience": patience}}
    )  # fmt: skip
    with trio.fail_after(120):
        async with open_learner(progress, lambda level, text: None) as learner:
            await learner.start(settings, None)
            yield learner


def scored(groups: list[RolloutGroup]) -> list[ScoredGroup]:
    rewards = (1.0, 0.0, 0.0, 1.0)
    return [ScoredGroup(group, "me", 1, rewards, advantages(rewards)) for group in groups]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_round_of_its_life_and_then_it_is_gone(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    async with started(lambda *progress: seen.append(progress)) as learner:
        assert learner.description["model"] == "tiny"
        groups = await learner.generate(TASKS, Sampling(4, 8), 1)
        assert [group.task for group in groups] == TASKS
        assert seen[-1] == (8, 8, "completions")
        assert groups == await learner.generate(TASKS, Sampling(4, 8), 1)
        assert (await learner.update(scored(groups), 1)).policy_step == 1
        assert await learner.fits(scored(groups)) == [True, True]
        changed = await learner.generate(TASKS, Sampling(4, 8), 1)
        await learner.generate_ahead(TASKS, Sampling(4, 8), 1)
        assert (await learner.generated_ahead())[0] == changed
        assert changed[0].completions[0].logprobs != groups[0].completions[0].logprobs
        with trio.CancelScope() as scope:
            # The last report comes when there is nothing left to stop: what follows is the answer.
            learner._on_progress = lambda done, total, unit: scope.cancel() if done == total else None
            assert (await learner.update(scored(groups), 1)).policy_step == 2, "applied, so it is told"
        # What it cannot do it says, and goes on.
        with pytest.raises(LearnerFailed):
            await learner.load(tmp_path / "nowhere")
        with pytest.raises(OSError, match="nowhere"):
            await learner.save(tmp_path / "nowhere")
        await learner.save(tmp_path)
        assert list(tmp_path.iterdir())
        pid = learner.pid
    assert gone(pid)


async def test_a_cancelled_request_stops_the_work_and_saving_still_works(tmp_path: Path) -> None:
    scope = trio.CancelScope()
    async with started(lambda *progress: scope.cancel()) as learner:
        with scope:
            await learner.generate(MANY, LARGE, 1)
        assert scope.cancelled_caught
        with pytest.raises(LearnerFailed):
            await learner.generate(TASKS, Sampling(4, 8), 1)
        await learner.save(tmp_path)
        assert list(tmp_path.iterdir())


async def test_a_killed_learner_is_reported_with_its_signal_and_last_words() -> None:
    async with started() as learner:
        said = list(learner.last_lines)
        assert said
        learner._on_progress = lambda *progress: os.kill(learner.pid, signal.SIGKILL)
        with pytest.raises(LearnerDied) as died:
            await learner.generate(MANY, LARGE, 1)
        assert "SIGKILL" in str(died.value)
        assert said[-1] in str(died.value)
        with pytest.raises(LearnerDied):
            await learner.save(Path("anywhere"))


async def test_a_learner_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(learner_module, "STOP_SECONDS", 1.0)
    async with started() as learner:

        def freeze(*progress: object) -> None:
            os.kill(learner.pid, signal.SIGSTOP)
            scope.cancel()

        learner._on_progress = freeze
        with trio.CancelScope() as scope:
            await learner.generate(MANY, LARGE, 1)
        assert scope.cancelled_caught
        assert gone(learner.pid)
        with pytest.raises(LearnerDied, match="did not stop"):
            await learner.save(tmp_path)


async def test_a_learner_that_falls_silent_is_killed_and_another_can_start() -> None:
    async with started(patience=1) as learner:
        learner._on_progress = lambda *progress: os.kill(learner.pid, signal.SIGSTOP)
        with pytest.raises(LearnerDied, match="did not answer for 1 s"):
            await learner.generate(MANY, LARGE, 1)
        assert gone(learner.pid)
    async with started(patience=1) as another:
        assert len(await another.generate(TASKS, Sampling(4, 8), 1)) == len(TASKS)


async def test_a_node_that_was_stopped_itself_does_not_take_the_learner_for_hung() -> None:
    async with started(patience=2) as learner:

        def suspend(*progress: object) -> None:
            # As when the lid of a laptop is closed: both stand still, and both go on.
            learner._on_progress = silent
            os.kill(learner.pid, signal.SIGSTOP)
            time.sleep(3)
            os.kill(learner.pid, signal.SIGCONT)

        learner._on_progress = suspend
        assert len(await learner.generate(MANY, LARGE, 1)) == len(MANY)


async def test_a_learner_that_never_gets_ready_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_module, "START_SECONDS", 1.0)
    settings = LearnerSettings.model_validate({"model": {"name": "tiny"}, "engine": {"patience": 1}})
    with trio.fail_after(60):
        async with open_learner(silent, lambda level, text: None) as learner:
            os.kill(learner.pid, signal.SIGSTOP)
            with pytest.raises(LearnerDied, match="did not get ready"):
                await learner.start(settings, None)
            assert gone(learner.pid)
