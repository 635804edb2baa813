"""The learning step on a real, small model."""

import math
from typing import Any

import pytest
import torch

from rl.batches import Group, Row
from rl.learner import Learner
from rl.rollouts import Completion, RolloutGroup, Sampling
from rl.settings import TrainingSettings
from tests.rl.learning import (
    UNCLIPPED,
    MakeLearner,
    as_text,
    assert_close,
    gradients,
    make_groups,
    same,
    scored,
    state_of,
    warm,
)
from verifiers.base import Task


def test_packed_and_plain_layouts_are_equal(make_learner: MakeLearner) -> None:
    packed, plain = warm(make_learner(training=UNCLIPPED)), warm(make_learner(training=UNCLIPPED))
    assert packed.policy.scorer.packing
    plain.policy.scorer.packing = False
    groups = make_groups()
    one, other = packed.policy.logprobs(groups), plain.policy.logprobs(groups)
    for row, values in one.items():
        assert torch.allclose(values, other[row], atol=2e-5)
    assert_close(gradients(packed, groups), gradients(plain, groups), 5e-5)


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("budget", [1, 30, 70])
def test_result_does_not_depend_on_the_split(make_learner: MakeLearner, loss: str, budget: int) -> None:
    whole = warm(make_learner(training={**UNCLIPPED, "loss": loss}))
    split = warm(make_learner(training={**UNCLIPPED, "loss": loss, "token_budget": budget}))
    assert_close(gradients(whole, make_groups()), gradients(split, make_groups()), 5e-5)


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
    assert_close(expected, gradients(learner, live), 5e-5)


def test_a_token_of_an_older_policy_counts_by_its_ratio_to_it_clipped_and_truncated(make_learner: MakeLearner) -> None:
    learner = warm(make_learner(training=UNCLIPPED))
    tokens, prompt = tuple(range(40, 50)), tuple(range(7))
    [plain] = learner.policy.logprobs([Group(prompt, (Row(tokens, 0.0),))]).values()
    # How far the policy has moved from what sampled, and what is left of each token's gradient.
    moved = [-1.0, -0.3, -0.1, 0.0, 0.1, 0.2, 0.3, 0.6, 0.8, 3.0]
    ratios = [math.exp(one) for one in moved]
    left = {1.0: [r if r < 1.28 else 0.0 for r in ratios], -1.0: [min(r, 2.0) if r > 0.8 else 0.0 for r in ratios]}
    sampled = tuple(float(now) - one for now, one in zip(plain, moved, strict=True))
    for advantage, weights in left.items():
        whole = gradients(learner_like(make_learner), [Group(prompt, (Row(tokens, advantage, sampled, stale=True),))])
        apart: dict[str, torch.Tensor] = {}
        for place, weight in enumerate(weights):
            # The tokens before it are context alone.
            row = Row(tokens[place : place + 1], weight * advantage / len(tokens))
            for name, gradient in gradients(
                learner_like(make_learner), [Group(prompt + tokens[:place], (row,))]
            ).items():
                apart[name] = apart.get(name, 0) + gradient
        assert_close(apart, whole, 1e-4)


def learner_like(make_learner: MakeLearner) -> Learner:
    """The same policy each time."""
    return warm(make_learner(training=UNCLIPPED))


def test_what_was_sampled_before_the_last_step_is_clipped_and_says_nothing_of_the_engine(
    make_learner: MakeLearner, tasks: list[Task]
) -> None:
    learner = make_learner(training={"lr": 0.05})
    now, ahead = ([scored(g, [1, 0, 0, 1]) for g in learner.generate(tasks, Sampling(4, 8), seed)] for seed in (1, 2))
    assert learner.update(now, 0).clip_fraction == 0
    stats = learner.update(ahead, 0)
    assert stats.clip_fraction > 0
    assert stats.engine_logprob_gap is None


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
    with caplog.at_level("DEBUG"):
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


def test_the_learning_rate_rises_stays_and_falls(make_learner: MakeLearner, tasks: list[Task]) -> None:
    learner = make_learner(training={"lr": 0.4, "warmup_steps": 4, "decay_after": 5})
    groups = [scored(g, [1, 0]) for g in learner.generate(tasks, Sampling(2, 8), 1)]
    rates = [learner.update(groups, 0).learning_rate for _ in range(6)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4 * (5 / 6) ** 0.5])


def test_a_learning_rate_that_is_to_stay_does() -> None:
    assert TrainingSettings(lr=0.4, decay_after=0).rate(10**6) == 0.4
    assert TrainingSettings(lr=0.4, decay_after=100).rate(10**4) == pytest.approx(0.04)
    slow = TrainingSettings(lr=0.4, decay_after=5, warmup_steps=100)
    assert [slow.rate(step) for step in (50, 100, 400)] == pytest.approx([0.2, 0.4, 0.2]), "a warm-up ends at the top"


def test_progress_moves_within_an_optimiser_step(make_learner: MakeLearner) -> None:
    learner = make_learner(training={"token_budget": 30, "epochs": 2})
    told: list[tuple[int, int, str]] = []
    groups = make_groups()
    learner.policy.update(groups, 0, progress=lambda *report: told.append(report))
    trained = sum(group.trained for group in groups if any(row.advantage for row in group.rows))
    assert {(total, unit) for _, total, unit in told} == {(2 * trained, "tokens")}
    done = [now for now, _, _ in told]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, 2 * trained)
    assert len(set(done)) > 6


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
    """An attention layer that is never told what sees what."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **{**kwargs, "attention_mask": None, "packed": None})


def test_a_model_that_takes_no_packed_groups_is_noticed(
    make_learner: MakeLearner, caplog: pytest.LogCaptureFixture
) -> None:
    learner = make_learner()
    scorer, vocabulary = learner.policy.scorer, len(learner.tokenizer)
    scorer.find_packing(vocabulary)
    assert scorer.packing
    for layer in learner.policy.model.get_decoder().layers:
        layer.self_attn = Deaf(layer.self_attn)
    scorer.find_packing(vocabulary)
    assert not scorer.packing
    assert "repeats its prompt" in caplog.text
