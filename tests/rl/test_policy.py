"""The learning step on a real, small model."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl.batches import Group, Row
from rl.errors import OutOfMemory, Stopped, TrainingError
from rl.learner import Learner
from rl.rollouts import Completion, RolloutGroup, Sampling
from tests.rl.learning import MakeLearner, as_text, same, scored, state_of
from verifiers.base import Task

LAST = "model.layers.1.mlp.down_proj"


def make_groups(seed: int = 0) -> list[Group]:
    """Groups of several prompt and completion lengths, one of them without any advantage."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 250, (count,), generator=generator).tolist())

    lengths = [[5, 1, 9, 3], [7, 7], [2, 2, 2], [12, 1, 4]]
    return [
        Group(ids(4 + 9 * i), tuple(Row(ids(n), 0.0 if i == 2 else (-1.0) ** j * (1 + j)) for j, n in enumerate(ns)))
        for i, ns in enumerate(lengths)
    ]


def gradients(learner: Learner, groups: list[Group]) -> dict[str, torch.Tensor]:
    """The gradient that the optimiser step of one update uses, before clipping changes anything."""
    kept: dict[str, torch.Tensor] = {}

    def keep(optimizer: Any, args: Any, kwargs: Any) -> None:
        for name, master in zip(learner.policy.weights.names, learner.policy.weights.masters, strict=True):
            kept[name] = torch.zeros_like(master) if master.grad is None else master.grad.clone()

    handle = learner.policy.optimizer.register_step_pre_hook(keep)
    learner.policy.update(groups, 0)
    handle.remove()
    return kept


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], relative: float) -> None:
    largest = max(float(value.abs().max()) for value in one.values())
    assert largest > 0
    for name, value in one.items():
        assert float((value - other[name]).abs().max()) <= relative * largest, name


def warm(learner: Learner) -> Learner:
    """Give the adapter values, so that both of its matrices have gradients."""
    with torch.no_grad():
        for number, master in enumerate(learner.policy.weights.masters):
            torch.nn.init.normal_(master, std=0.2, generator=torch.Generator().manual_seed(number))
    learner.policy.weights.publish()
    return learner


UNCLIPPED = {"lr": 1e-2, "max_grad_norm": 1e9}


def test_packed_and_plain_layouts_are_equal(make_learner: MakeLearner) -> None:
    packed, plain = warm(make_learner(training=UNCLIPPED)), warm(make_learner(training=UNCLIPPED))
    assert packed.policy.packing
    plain.policy.packing = False
    groups = make_groups()
    one, other = packed.policy.logprobs(groups), plain.policy.logprobs(groups)
    for row, values in one.items():
        assert torch.allclose(values, other[row], atol=2e-5)
    assert_close(gradients(packed, groups), gradients(plain, groups), 1e-5)


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("budget", [1, 30, 70])
def test_result_does_not_depend_on_the_split(make_learner: MakeLearner, loss: str, budget: int) -> None:
    whole = warm(make_learner(training={**UNCLIPPED, "loss": loss}))
    split = warm(make_learner(training={**UNCLIPPED, "loss": loss, "token_budget": budget}))
    assert_close(gradients(whole, make_groups()), gradients(split, make_groups()), 1e-5)


def test_gradient_is_that_of_the_written_out_loss(make_learner: MakeLearner) -> None:
    """Against the plainest possible computation: one row at a time, all logits, -A log p averaged by token."""
    learner, plain = warm(make_learner(training=UNCLIPPED)), warm(make_learner(training=UNCLIPPED))
    groups = make_groups()
    tokens = sum(len(row.tokens) for group in groups for row in group.rows if row.advantage)
    for group in groups:
        for row in group.rows:
            ids = torch.tensor([[*group.prompt, *row.tokens]])
            logits = plain.policy.model(input_ids=ids).logits[0, len(group.prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, ids[0, len(group.prompt) :, None])
            (-row.advantage * logprobs.sum() / tokens).backward()  # type: ignore[no-untyped-call]
    weights = plain.policy.weights
    expected = {n: m.grad for n, m in zip(weights.names, weights.masters, strict=True) if m.grad is not None}
    live = [group for group in groups if any(row.advantage for row in group.rows)]
    assert_close(expected, gradients(learner, live), 1e-5)


def test_zero_variance_groups_count_only_if_kept(make_learner: MakeLearner, tasks: list[Task]) -> None:
    losses = {}
    for choice in ("drop", "keep"):
        learner = make_learner(training={"zero_variance": choice})
        groups = learner.generate(tasks[:2], Sampling(4, 8), 1)
        stats = learner.update([scored(groups[0], [1, 0, 0, 0]), scored(groups[1], [1, 1, 1, 1])], 0)
        assert stats.tokens_trained == sum(len(c.tokens or ()) for c in groups[0].completions)
        losses[choice] = stats.grad_norm
    assert losses["keep"] < losses["drop"]


def test_nothing_to_learn_changes_nothing(make_learner: MakeLearner, tasks: list[Task]) -> None:
    learner = make_learner()
    before = state_of(learner)
    stats = learner.update([scored(g, [0, 0]) for g in learner.generate(tasks, Sampling(2, 8), 1)], 0)
    assert (stats.tokens_trained, stats.policy_step, stats.grad_norm) == (0, 0, 0.0)
    assert same(state_of(learner), before)
    assert learner.update([], 0).tokens_trained == 0


def one_of_two(task: Task, text: str, finished: bool, other_finished: bool = True) -> RolloutGroup:
    other = Completion("other answer", other_finished)
    return RolloutGroup(task, (Completion(text, finished), other), 0)


def test_a_finished_completion_trains_its_end_and_a_truncated_one_does_not(
    make_learner: MakeLearner, tasks: list[Task]
) -> None:
    def end(learner: Learner) -> float:
        """Log-prob of EOS after the answer."""
        prompt = learner._group(scored(one_of_two(tasks[0], "12", True), [1, 0]))
        return float(learner.policy.logprobs([prompt])[prompt.rows[0]][-1])

    gains = {}
    for finished in (True, False):
        learner = make_learner(training={"lr": 0.02})
        before = end(learner)
        for seed in range(5):
            learner.update([scored(one_of_two(tasks[0], "12", finished, other_finished=False), [1, 0])], seed)
        gains[finished] = end(learner) - before
    assert gains[True] > 0.5
    assert gains[False] < gains[True] / 2


@pytest.mark.parametrize(("choice", "tokens"), [("keep", 2 + 13), ("drop", 13)])
def test_truncated_completions(make_learner: MakeLearner, tasks: list[Task], choice: str, tokens: int) -> None:
    learner = make_learner(training={"truncated": choice})
    assert learner.update([scored(one_of_two(tasks[0], "12", False), [1, 0])], 0).tokens_trained == tokens


def test_empty_completions(make_learner: MakeLearner, tasks: list[Task]) -> None:
    learner = make_learner()
    assert learner.update([scored(one_of_two(tasks[0], "", True), [1, 0])], 0).tokens_trained == 1 + 13
    assert learner.update([scored(one_of_two(tasks[0], "", False), [1, 0])], 0).tokens_trained == 13


def test_what_does_not_fit_the_model_is_left_out(
    make_learner: MakeLearner, tasks: list[Task], caplog: pytest.LogCaptureFixture
) -> None:
    learner = make_learner()
    long = Task(tasks[0].ref, "sum", "1" * 600, None)
    groups = [
        scored(one_of_two(long, "12", True), [1, 0], "stranger"),
        scored(one_of_two(tasks[0], "1" * 600, True), [1, 0], "talker"),
    ]
    assert learner.update(groups, 0).tokens_trained == 13
    assert "stranger" in caplog.text
    assert "talker" in caplog.text


def test_own_tokens_are_trained_as_sampled(make_learner: MakeLearner, tasks: list[Task]) -> None:
    learner = make_learner()
    [group] = learner.generate(tasks[:1], Sampling(8, 12), 2)
    stats = learner.update([scored(group, [1, 0, 0, 0, 0, 0, 0, 0])], 0)
    assert stats.tokens_trained == sum(len(c.tokens or ()) for c in group.completions)
    assert stats.engine_logprob_gap is not None
    assert stats.engine_logprob_gap < 2e-5
    assert learner.update([scored(as_text(group), [1, 0, 0, 0, 0, 0, 0, 0])], 0).engine_logprob_gap is None


def test_several_epochs_make_clipping_live(make_learner: MakeLearner, tasks: list[Task]) -> None:
    once, often = (
        make_learner(training={"lr": 0.05}),
        make_learner(training={"lr": 0.05, "epochs": 3, "minibatches": 2}),
    )
    groups = [scored(g, [1, 0, 0, 1]) for g in once.generate(tasks, Sampling(4, 8), 1)]
    assert once.update(groups, 0).clip_fraction == 0
    stats = often.update(groups, 0)
    assert stats.clip_fraction > 0
    assert stats.policy_step == 6
    assert stats.engine_logprob_gap is not None
    assert stats.engine_logprob_gap < 2e-5


def test_kl_holds_the_policy_near_the_base(make_learner: MakeLearner, tasks: list[Task]) -> None:
    for rank in (4, 0):
        distances = []
        for kl in (0.0, 5.0):
            learner = make_learner(lora={"rank": rank}, training={"lr": 0.01, "kl": kl})
            groups = learner.generate(tasks, Sampling(4, 8), 1)
            updates = [learner.update([scored(g, [1, 0, 0, 1]) for g in groups], 0) for _ in range(8)]
            if kl:
                assert updates[0].kl == pytest.approx(0, abs=1e-5)
                assert updates[-1].kl > 0
            rows = [learner._group(scored(g, [1, 0, 0, 1])) for g in groups]
            now, base = learner.policy.logprobs(rows), learner.policy.logprobs(rows, base=True)
            distances.append(float(torch.cat([(now[row] - base[row]).abs() for row in now]).mean()))
        assert distances[1] < distances[0]


def test_warm_up(make_learner: MakeLearner, tasks: list[Task]) -> None:
    learner = make_learner(training={"lr": 0.4, "warmup_steps": 4})
    groups = [scored(g, [1, 0]) for g in learner.generate(tasks, Sampling(2, 8), 1)]
    rates = [learner.update(groups, 0).learning_rate for _ in range(5)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


# What goes wrong


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


def test_no_memory_for_a_single_completion(make_learner: MakeLearner) -> None:
    learner = make_learner()
    fail_above(learner, 3, MemoryError())
    before = state_of(learner)
    with pytest.raises(OutOfMemory, match="single completion"):
        learner.policy.update(make_groups(), 0)
    assert same(state_of(learner), before)


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


# What it is for


@pytest.mark.parametrize("rank", [4, 0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_learns_what_is_rewarded(make_learner: MakeLearner, tasks: list[Task], rank: int, dtype: str) -> None:
    learner = make_learner(
        lora={"rank": rank}, model={"dtype": dtype}, training={"lr": 3e-2 if rank else 3e-3}, prompt={"shots": 0}
    )

    def rewards(group: RolloutGroup) -> list[float]:
        return [float(any(c in completion.text for c in "aeiou")) for completion in group.completions]

    means = []
    for round_number in range(20):
        groups = [scored(g, rewards(g)) for g in learner.generate(tasks, Sampling(16, 4), round_number)]
        means.append(sum(group.mean_reward for group in groups) / len(groups))
        learner.update(groups, round_number)
    assert sum(means[-4:]) / 4 > sum(means[:4]) / 4 + 0.3


class Deaf(torch.nn.Module):
    """An attention layer that is never shown a mask of its caller's."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **{**kwargs, "attention_mask": None})


def test_a_model_that_takes_no_block_mask_is_noticed(
    make_learner: MakeLearner, caplog: pytest.LogCaptureFixture
) -> None:
    learner = make_learner()
    assert learner.policy._takes_block_mask()
    for layer in learner.policy.model.get_decoder().layers:
        layer.self_attn = Deaf(layer.self_attn)
    assert not learner.policy._takes_block_mask()
    assert "repeats its prompt" in caplog.text
