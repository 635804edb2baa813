"""What goes wrong in a learning step on a real, small model, and what is left of it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl.errors import OutOfMemory, Stopped, TrainingError
from rl.learner import Learner
from rl.rollouts import Sampling
from tests.rl.learning import UNCLIPPED, MakeLearner, assert_close, gradients, make_groups, same, state_of, warm
from verifiers.base import Task

LAST = "model.layers.1.mlp.down_proj"


def fail_above(learner: Learner, limit: int, error: Exception) -> Callable[[], None]:
    """Make the model itself fail on more than `limit` positions at once, as an allocator would."""

    def allocate(module: Any, args: Any, kwargs: dict[str, torch.Tensor]) -> None:
        if kwargs["input_ids"].numel() > limit:
            raise error

    handle = learner.policy.model.get_decoder().register_forward_pre_hook(allocate, with_kwargs=True)
    return lambda: handle.remove()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        MemoryError(),
    ],
)
def test_out_of_memory_halves_the_budget_and_changes_no_result(
    make_learner: MakeLearner, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    plain, short = warm(make_learner(training=UNCLIPPED)), warm(make_learner(training=UNCLIPPED))
    fail_above(short, 50, error)
    assert_close(gradients(plain, make_groups()), gradients(short, make_groups()), 1e-5)
    assert short.policy.token_budget <= 100
    assert short.policy.update(make_groups(), 0).token_budget == short.policy.token_budget
    assert f"token budget is now {short.policy.token_budget}" in caplog.text


def test_out_of_memory_halfway_through_a_step_counts_nothing_twice(make_learner: MakeLearner) -> None:
    training = {**UNCLIPPED, "token_budget": 60}
    plain, short = warm(make_learner(training=training)), warm(make_learner(training=training))
    passes = 0

    def fail_once(module: Any, gradient_in: Any, gradient_out: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == 2:
            raise torch.OutOfMemoryError("injected in the second backward pass")

    short.policy.model.get_decoder().norm.register_full_backward_hook(fail_once)
    assert_close(gradients(plain, make_groups()), gradients(short, make_groups()), 1e-5)
    assert passes > 2


def test_less_memory_for_a_single_completion_is_more_time_and_the_same_result(
    make_learner: MakeLearner, caplog: pytest.LogCaptureFixture, tasks: list[Task]
) -> None:
    plain, short = warm(make_learner(training=UNCLIPPED)), warm(make_learner(training=UNCLIPPED))
    decoder = short.policy.model.get_decoder()
    runs = 0

    def allocate(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal runs
        runs += 1
        if not decoder.layers[0].gradient_checkpointing:
            raise torch.OutOfMemoryError("injected where layers keep what they compute")

    decoder.layers[0].self_attn.register_forward_pre_hook(allocate, with_kwargs=True)
    expected = gradients(plain, make_groups())
    assert_close(expected, gradients(short, make_groups()), 5e-5)
    assert "layers are computed twice" in caplog.text
    # Sampling keeps its cache of keys and values.
    sampled = [learner.generate(tasks[:1], Sampling(2, 8), 3)[0].completions for learner in (plain, short)]
    assert [completion.text for completion in sampled[0]] == [completion.text for completion in sampled[1]]
    runs = 0
    for group in make_groups():
        logprobs, _ = short.policy.scorer.score(short.policy.scorer.collate([group]))
        once, runs = runs, 0
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        assert (once, runs) == (1, 1), "each layer is computed again on the way back"
        runs = 0


def test_no_memory_for_logprobs_makes_no_later_step_slower(
    make_learner: MakeLearner, caplog: pytest.LogCaptureFixture
) -> None:
    learner = make_learner()
    fail_above(learner, 3, MemoryError())
    with pytest.raises(OutOfMemory, match="single completion"):
        learner.policy.logprobs(make_groups())
    assert "computed twice" not in caplog.text


def test_no_memory_for_a_single_completion(make_learner: MakeLearner) -> None:
    learner = make_learner()
    fail_above(learner, 3, MemoryError())
    before = state_of(learner)
    with pytest.raises(OutOfMemory, match="single completion"):
        learner.policy.update(make_groups(), 0)
    assert same(state_of(learner), before)


def test_no_memory_for_the_optimiser_is_known_from_the_start(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(lora={"rank": 0})
    parts = state_of(learner).keys()
    learner.policy.update(make_groups(), 0)
    # The first step allocates nothing that stays.
    assert state_of(learner).keys() == parts

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "zeros_like", fail)
    with pytest.raises(OutOfMemory, match="take a smaller model"):
        make_learner(lora={"rank": 0})


@pytest.mark.parametrize("epochs", [1, 3])
def test_no_memory_in_an_optimiser_step_changes_nothing(make_learner: MakeLearner, epochs: int) -> None:
    learner = make_learner(training={"epochs": epochs})
    learner.policy.update(make_groups(), 0)
    before, step = state_of(learner), learner.policy.step

    def fail(*args: Any) -> None:
        if learner.policy.step - step == epochs - 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = learner.policy.optimizer.register_step_pre_hook(fail)
    with pytest.raises(OutOfMemory, match="smaller model"):
        learner.policy.update(make_groups(), 0)
    handle.remove()
    assert same(state_of(learner), before)
    learner.policy.update(make_groups(), 0)
    assert learner.policy.step == step + epochs


def test_other_errors_are_not_taken_for_memory(make_learner: MakeLearner) -> None:
    learner = make_learner()
    fail_above(learner, 3, RuntimeError("device-side assert"))
    with pytest.raises(RuntimeError, match="assert"):
        learner.policy.update(make_groups(), 0)


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_loss_that_is_not_finite_changes_nothing(make_learner: MakeLearner, epochs: int) -> None:
    learner = make_learner(training={"epochs": epochs})
    learner.policy.update(make_groups(), 0)
    before, step = state_of(learner), learner.policy.step

    def poison(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        # In the last of several optimiser steps, when others have been made.
        return output * (math.nan if learner.policy.step - step == epochs - 1 and torch.is_grad_enabled() else 1)

    handle = learner.policy.model.get_submodule(LAST).register_forward_hook(poison)
    with pytest.raises(TrainingError, match="loss is nan"):
        learner.policy.update(make_groups(), 0)
    handle.remove()
    assert same(state_of(learner), before)
    assert learner.policy.step == step
    learner.policy.update(make_groups(), 0)
    assert not same(state_of(learner), before)


def test_a_gradient_that_is_not_finite_changes_nothing(make_learner: MakeLearner) -> None:
    learner = make_learner()
    before = state_of(learner)

    def poison(module: Any, gradient_in: Any, gradient_out: Any) -> Any:
        return tuple(g * math.inf if g is not None else None for g in gradient_in)

    handle = learner.policy.model.get_decoder().norm.register_full_backward_hook(poison)
    with pytest.raises(TrainingError, match="gradient"):
        learner.policy.update(make_groups(), 0)
    handle.remove()
    assert same(state_of(learner), before)


@pytest.mark.parametrize(
    ("part", "ruin"),
    [("weight", math.nan), ("weight", 3.4e38), ("exp_avg", math.nan), ("exp_avg", 1e38), ("exp_avg_sq", math.inf)],
)
def test_weights_that_would_not_be_finite_are_never_made(make_learner: MakeLearner, part: str, ruin: float) -> None:
    learner = make_learner(lora={"rank": 0}, training={"lr": 1.0, "weight_decay": 1.0})
    # A weight that no input reaches: neither loss nor gradient tells.
    row, policy = learner.policy.weights.names.index("model.embed_tokens.weight"), learner.policy
    master = policy.weights.masters[row]
    target = master if part == "weight" else policy.optimizer.state[master][part]
    with torch.no_grad():
        target[270] = ruin
    before = state_of(learner)
    with pytest.raises(TrainingError, match="not finite"):
        policy.update(make_groups(), 0)
    assert all(torch.equal(value.nan_to_num(), state_of(learner)[key].nan_to_num()) for key, value in before.items())
    assert policy.step == 0


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("questions", [2, 5, 9])
def test_a_stopped_update_changes_nothing(make_learner: MakeLearner, epochs: int, questions: int) -> None:
    learner = make_learner(training={"epochs": epochs, "minibatches": 2, "token_budget": 40})
    learner.policy.update(make_groups(), 0)
    before, step = state_of(learner), learner.policy.step
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > questions

    with pytest.raises(Stopped):
        learner.policy.update(make_groups(), 0, stop=stop)
    assert same(state_of(learner), before)
    assert learner.policy.step == step
