"""Live or loud: an engine that does not sample from the policy, or fails, is replaced once and then reported."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rl.engines.base import Sampled
from rl.engines.live import MANY_TOKENS, LiveEngine, a_few, many
from rl.engines.transformers import TransformersEngine
from rl.errors import EngineError, OutOfMemory
from rl.learner import Learner
from rl.policy import Policy
from rl.rollouts import Sampling
from rl.settings import LearnerSettings
from rl.work import never, no_progress
from tests.rl.learning import MakeLearner, scored
from verifiers.base import Task

PROMPTS = [[1, 2, 3], [40, 41]]


class Faulty(TransformersEngine):
    """Does `fault` to what it samples."""

    def __init__(self, policy: Policy, fault: Callable[[Sampled], Sampled] | None) -> None:
        super().__init__(policy, 64)
        self._fault = fault
        self.closed = False
        self.seconds_sync = 0.25

    def generate(self, *args: Any, **settings: Any) -> list[list[Sampled]]:
        groups = super().generate(*args, **settings)
        return [[self._fault(s) if self._fault else s for s in group] for group in groups]

    def close(self) -> None:
        self.closed = True


def off_by(nats: float) -> Callable[[Sampled], Sampled]:
    return lambda s: replace(s, logprobs=tuple(x + nats for x in s.logprobs))


def broken(error: Exception) -> Callable[[Sampled], Sampled]:
    def fail(sampled: Sampled) -> Sampled:
        raise error

    return fail


def replace_engine(
    learner: Learner, *faults: Callable[[Sampled], Sampled] | None, limit: float = 0.06
) -> tuple[LiveEngine, list[Faulty]]:
    """Give a learner engines with these faults, one after the other."""
    opened: list[Faulty] = []

    def opening(settings: LearnerSettings, policy: Policy) -> tuple[Faulty, str]:
        opened.append(Faulty(policy, faults[len(opened)]))
        return opened[-1], "a test"

    live = LiveEngine(learner.settings, learner.policy, opening)
    learner._live = live
    return live, opened


@pytest.mark.parametrize("fault", [off_by(0.13), off_by(-0.13), off_by(math.nan)])
def test_an_engine_that_serves_something_else_is_caught(
    make_learner: MakeLearner, tasks: list[Task], fault: Callable[[Sampled], Sampled]
) -> None:
    learner = make_learner()
    _, opened = replace_engine(learner, fault, fault)
    with pytest.raises(EngineError, match=r"differ by (0\.13|nan).* nats .* engine\.max_logprob_gap = 0\.06"):
        learner.generate(tasks, Sampling(8, 8), 0)
    assert [engine.closed for engine in opened] == [True, True]


@pytest.mark.parametrize(
    "fault", [off_by(0.13), broken(EngineError("EngineDeadError")), broken(OutOfMemory("no room"))]
)
def test_one_failure_costs_a_rebuild_and_is_counted(
    make_learner: MakeLearner, tasks: list[Task], fault: Callable[[Sampled], Sampled]
) -> None:
    learner, plain = make_learner(), make_learner()
    _, opened = replace_engine(learner, fault, None)
    groups = learner.generate(tasks, Sampling(4, 8), 5)
    assert groups == plain.generate(tasks, Sampling(4, 8), 5)
    assert [engine.closed for engine in opened] == [True, False]
    stats = learner.update([scored(group, [1, 0, 0, 1]) for group in groups], 0)
    assert stats.engine_restarts == 1
    assert stats.engine_logprob_gap == pytest.approx(0, abs=1e-4)
    assert stats.seconds_sync == pytest.approx(0.5)
    again = learner.update([scored(group, [1, 0, 0, 1]) for group in learner.generate(tasks, Sampling(4, 8), 6)], 1)
    assert (again.engine_restarts, again.seconds_sync) == (0, 0.0)


def test_the_gap_is_known_without_a_learning_step(make_learner: MakeLearner, tasks: list[Task]) -> None:
    learner = make_learner()
    replace_engine(learner, off_by(0.02))
    groups = learner.generate(tasks, Sampling(4, 8), 0)
    stats = learner.update([scored(group, [1, 1, 1, 1]) for group in groups], 0)
    assert stats.tokens_trained == 0
    assert stats.engine_logprob_gap == pytest.approx(0.02, abs=1e-3)


def test_the_gap_of_an_evaluation_is_not_that_of_a_round(make_learner: MakeLearner, tasks: list[Task]) -> None:
    learner = make_learner()
    replace_engine(learner, off_by(0.02))
    groups = learner.generate(tasks, Sampling(4, 8), 0)
    learner._live._engine = Faulty(learner.policy, off_by(0.05))
    learner.generate(tasks, Sampling(4, 8), 1, keep=False)
    stats = learner.update([scored(group, [1, 0, 0, 1]) for group in groups], 0)
    assert stats.engine_logprob_gap == pytest.approx(0.02, abs=1e-3)


def test_a_base_model_is_held_against_the_base_model(make_learner: MakeLearner, tasks: list[Task]) -> None:
    learner = make_learner(training={"lr": 0.5})
    replace_engine(learner, None)
    groups = learner.generate(tasks, Sampling(4, 8), 0)
    learner.update([scored(group, [1, 0, 0, 1]) for group in groups], 0)
    assert len(learner.generate(tasks, Sampling(4, 8), 0, base=True)) == len(tasks)


def test_words_that_were_said_are_not_said_again(make_learner: MakeLearner) -> None:
    learner = make_learner()
    _, opened = replace_engine(learner, broken(EngineError("gone")), None)
    said: list[str] = []
    with pytest.raises(EngineError, match="gone"):
        learner.chat([{"role": "user", "content": "1?"}], Sampling(1, 8), 3, say=said.append)
    assert opened[0].closed
    before = len(said)
    assert learner.chat([{"role": "user", "content": "1?"}], Sampling(1, 8), 3, say=said.append).tokens
    assert len(said) == 2 * before


def test_the_engine_is_opened_when_it_is_needed(make_learner: MakeLearner, tmp_path: Any) -> None:
    learner = make_learner()
    _, opened = replace_engine(learner, None)
    learner.save(tmp_path)
    assert not opened
    learner.open_engine()
    assert len(opened) == 1
    assert learner.describe()["engine_why"] == "a test"


def test_few_tokens_may_differ_by_chance(make_learner: MakeLearner) -> None:
    learner = make_learner()
    noisy = [0.0, 0.3, 0.0, 0.0]

    def noise(sampled: Sampled) -> Sampled:
        given = sampled.logprobs or ()
        return replace(sampled, logprobs=tuple(x + n for x, n in zip(given, [*noisy * 9], strict=False)))

    live, _ = replace_engine(learner, noise)
    live.generate([[1, 2]], Sampling(1, 4), 0, stop=never, progress=no_progress)


def test_whole_completions_of_every_group_are_checked_in_the_end() -> None:
    groups = [[Sampled(tuple(range(100)), (-1.0,) * 100, False)] * 8, [Sampled((1,), (-1.0,), True)] * 8]
    picked = many(PROMPTS, groups)
    assert [group.prompt for group in picked] == [(1, 2, 3), (40, 41)]
    total = sum(len(row.tokens) for group in picked for row in group.rows)
    assert total <= MANY_TOKENS + 100
    assert len(picked[1].rows) >= 7
    assert many(PROMPTS, [[Sampled((), (), False)], []]) == []


def test_the_first_look_is_at_other_groups_after_each_update() -> None:
    groups = [[Sampled((place,) * 10, (-1.0,) * 10, False)] * 8 for place in range(5)]
    prompts = [[place] for place in range(5)]
    looks = [[group.prompt[0] for group in a_few(prompts, groups, turn)] for turn in range(5)]
    assert looks == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]
    assert a_few(prompts, [[], [], [], [], []], 3) == []
    # Nothing was said in all but one.
    silent = [[Sampled((), (), False)] * 8] * 4
    assert [group.prompt for group in a_few(prompts, [*silent, groups[4]], 7)] == [(4,)]


def test_a_first_look_above_the_limit_is_not_the_last_word(make_learner: MakeLearner, tasks: list[Task]) -> None:
    learner = make_learner()
    asked = iter(range(10**6))

    def first_ones_off(one: Sampled) -> Sampled:
        # The completions of the first look, the first of all, and no others.
        return off_by(0.1)(one) if next(asked) < 4 else one

    replace_engine(learner, first_ones_off)
    assert len(learner.generate(tasks, Sampling(16, 8), 0)) == len(tasks)
