"""Sampling ahead: beside the learning step, from the policy before it, and nothing that goes wrong is lost."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl import machine
from rl.engines.base import Sampled
from rl.engines.live import LiveEngine
from rl.engines.transformers import TransformersEngine
from rl.engines.vllm import spare_cores
from rl.errors import EngineError, Stopped
from rl.learner import Learner
from rl.policy import Policy
from rl.rollouts import Sampling
from rl.settings import LearnerSettings
from rl.work import Stop, check_stop
from tests.rl.learning import MakeLearner, gradients, make_groups, same, scored, state_of
from verifiers.base import Task

SAMPLING = Sampling(4, 8)
PATIENCE = 20.0


class Apart(TransformersEngine):
    """Samples once it is `let`, as one that takes as long as it likes, and only then looks at the weights."""

    apart = True

    def __init__(self, policy: Policy, trouble: Callable[[list[list[Sampled]]], list[list[Sampled]]]) -> None:
        super().__init__(policy, 64)
        self._trouble = trouble
        self.let = threading.Event()
        self.ended = threading.Event()
        self.threads: set[str] = set()

    def generate(self, *args: Any, stop: Stop, **settings: Any) -> list[list[Sampled]]:
        self.threads.add(threading.current_thread().name)
        try:
            while not self.let.wait(0.01):
                check_stop(stop)
            return self._trouble(super().generate(*args, stop=stop, **settings))
        finally:
            self.ended.set()


def as_it_is(groups: list[list[Sampled]]) -> list[list[Sampled]]:
    return groups


def off(groups: list[list[Sampled]]) -> list[list[Sampled]]:
    return [[Sampled(s.tokens, tuple(x - 1 for x in s.logprobs), s.finished) for s in group] for group in groups]


def lost(groups: list[list[Sampled]]) -> list[list[Sampled]]:
    raise EngineError("EngineDeadError")


def with_engines(
    learner: Learner, *troubles: Callable[[list[list[Sampled]]], list[list[Sampled]]]
) -> tuple[Learner, list[Apart]]:
    """The learner, with engines that sample apart, one after the other. All but the first sample at once."""
    opened: list[Apart] = []

    def opening(settings: LearnerSettings, policy: Policy) -> tuple[Apart, str]:
        opened.append(Apart(policy, troubles[len(opened)]))
        if len(opened) > 1:
            opened[-1].let.set()
        return opened[-1], "a test"

    learner._live = LiveEngine(learner.settings, learner.policy, opening)
    learner.open_engine()
    return learner, opened


def test_an_update_goes_on_beside_the_sampling_and_steps_after_it(make_learner: MakeLearner, tasks: list[Task]) -> None:
    plain = make_learner(training={"lr": 0.05})
    learner, [engine] = with_engines(make_learner(training={"lr": 0.05}), as_it_is)
    expected = plain.generate(tasks, SAMPLING, 2)
    groups = [scored(group, [1, 0, 0, 1]) for group in plain.generate(tasks, SAMPLING, 1)]
    learner.generate_ahead(tasks, SAMPLING, 2)

    def half_done(done: int, total: int, unit: str) -> None:
        # Before the update is through, so that it would wait for ever if it waited for the sampling first.
        if done == total:
            assert not engine.ended.is_set()
            engine.let.set()

    assert learner.update(groups, 0, progress=half_done).loss == plain.update(groups, 0).loss
    assert same(state_of(learner), state_of(plain))
    sampled, seconds = learner.generated_ahead()
    assert sampled == expected, "by the policy before the step"
    assert [group.policy_step for group in sampled] == [0] * len(tasks)
    assert seconds > 0
    assert not any(threading.main_thread().name in name for name in engine.threads)
    # How far it was off the policy it came from, not off the one that trains on it.
    stats = learner.update([scored(group, [1, 0, 0, 1]) for group in sampled], 1)
    assert stats.engine_logprob_gap == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("trouble", [lost, off])
def test_sampling_that_fails_costs_no_update_and_is_done_again(
    make_learner: MakeLearner, tasks: list[Task], trouble: Callable[[list[list[Sampled]]], list[list[Sampled]]]
) -> None:
    plain = make_learner(training={"lr": 0.05})
    learner, engines = with_engines(make_learner(training={"lr": 0.05}), trouble, as_it_is)
    groups = [scored(group, [1, 0, 0, 1]) for group in plain.generate(tasks, SAMPLING, 1)]
    learner.generate_ahead(tasks, SAMPLING, 2)
    engines[0].let.set()
    assert learner.update(groups, 0).engine_restarts == 1
    plain.update(groups, 0)
    assert same(state_of(learner), state_of(plain))
    sampled, _ = learner.generated_ahead()
    assert sampled == plain.generate(tasks, SAMPLING, 2), "by the policy that there is now"
    assert [group.policy_step for group in sampled] == [1] * len(tasks)


def test_an_engine_that_fails_each_time_is_reported(make_learner: MakeLearner, tasks: list[Task]) -> None:
    learner, [engine] = with_engines(make_learner(), *[lost] * 3)
    learner.generate_ahead(tasks, SAMPLING, 2)
    engine.let.set()
    with pytest.raises(EngineError, match="EngineDeadError"):
        learner.generated_ahead()


def test_whatever_else_samples_waits_for_it(make_learner: MakeLearner, tasks: list[Task]) -> None:
    plain = make_learner()
    learner, [engine] = with_engines(make_learner(), as_it_is)
    learner.generate_ahead(tasks, SAMPLING, 2)
    threading.Timer(0.2, engine.let.set).start()
    assert learner.generate(tasks, SAMPLING, 7) == plain.generate(tasks, SAMPLING, 7)
    assert learner.generated_ahead()[0] == plain.generate(tasks, SAMPLING, 2)


def test_a_stop_ends_the_sampling_and_leaves_the_policy(
    make_learner: MakeLearner, tasks: list[Task], tmp_path: Path
) -> None:
    stopping = threading.Event()
    learner, [engine] = with_engines(make_learner(), as_it_is)
    learner._stop = stopping.is_set
    before = state_of(learner)
    learner.generate_ahead(tasks, SAMPLING, 2)
    groups = [scored(group, [1, 0, 0, 1]) for group in make_learner().generate(tasks, SAMPLING, 1)]
    threading.Timer(0.2, stopping.set).start()
    with pytest.raises(Stopped):
        learner.update(groups, 0)
    assert same(before, state_of(learner))
    learner.save(tmp_path)
    assert not engine.ended.is_set()
    learner.close()
    assert engine.ended.wait(PATIENCE)


def test_an_engine_that_hangs_keeps_nobody_believing_that_it_works(
    make_learner: MakeLearner, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask() -> bool:
        asked.append("of the learner")
        return False

    learner, [engine] = with_engines(make_learner(), as_it_is)
    hanging = threading.Event()

    def generate(*args: Any, stop: Stop, **settings: Any) -> list[list[Sampled]]:
        stop()
        hanging.wait(PATIENCE)
        return [[] for _ in tasks]

    monkeypatch.setattr(engine, "generate", generate)
    learner.generate_ahead(tasks, SAMPLING, 2)
    threading.Timer(0.5, hanging.set).start()
    learner._live.settle(ask)
    assert len(asked) == 1, "each time is what the node takes for a sign of life"


def test_memory_that_runs_out_for_a_look_at_the_engine_costs_no_gradient(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = make_groups()
    expected = gradients(make_learner(), groups)
    learner = make_learner()
    score = learner.policy.scorer.score
    failures = [MemoryError()]

    def look() -> None:
        def fail_once(*args: Any, **settings: Any) -> Any:
            if failures:
                raise failures.pop()
            return score(*args, **settings)

        monkeypatch.setattr(learner.policy.scorer, "score", fail_once)
        learner.policy.logprobs(groups)

    learner.policy.before_step = look
    found = gradients(learner, groups)
    assert not failures
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_an_engine_has_the_cores_that_the_settings_leave_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpus", lambda: 4)
    left = {threads: spare_cores(LearnerSettings(threads=threads)) for threads in (0, 1, 3, 4, 9)}
    assert left == {0: 0, 1: 3, 3: 1, 4: 0, 9: 0}
