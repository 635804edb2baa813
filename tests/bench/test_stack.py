"""Stacked policies compute what transformers' Llama does, each for itself, and train as with torch's optimiser."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from bench.sim.adam import StackedAdam
from bench.sim.pretrain import Lessons, cached, pretrain, specialise
from bench.sim.stack import Shape, StackedPolicy, export, stack
from bench.tiny_vocab import build_tokenizer
from rl.batches import Group, Row

torch.set_num_threads(1)

SHAPE = Shape(vocabulary=40, context=32, width=16, layers=2, heads=2)
EOS = 39


def lively(shape: Shape, nodes: int) -> StackedPolicy:
    """Different policies, far enough from zero that every part of the model has a say."""
    policy = stack([StackedPolicy.random(shape, seed) for seed in range(nodes)])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in policy.weights.values():
            weight += 0.25 * torch.randn(weight.shape, generator=generator)
    return policy


def make_groups(rng: random.Random, rows: Sequence[int], vocabulary: int = SHAPE.vocabulary) -> list[Group]:
    """Groups of so many rows each, with prompts and completions of mixed lengths."""

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(rng.randint(1, most)))

    return [Group(ids(16), tuple(Row(ids(8), 1.0) for _ in range(count))) for count in rows]


def uneven(vocabulary: int = SHAPE.vocabulary) -> list[list[Group]]:
    rng = random.Random(1)
    return [make_groups(rng, rows, vocabulary) for rows in ([8, 1, 3, 8], [], [1], [2, 5, 4, 1, 1, 1, 8])]


def test_scores_are_those_of_transformers_for_an_exported_policy(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    shape = Shape(vocabulary=len(tokenizer), context=32, width=32, layers=2, heads=2)
    policy = lively(shape, 4)
    groups = uneven(len(tokenizer))
    scores = policy.scores(groups)
    export(policy, 3, tmp_path, tokenizer)
    llama = LlamaForCausalLM.from_pretrained(tmp_path)
    expected: list[Tensor] = []
    for group in groups[3]:
        for row in group.rows:
            places = slice(len(group.prompt) - 1, len(group.prompt) + len(row.tokens) - 1)
            with torch.no_grad():
                logits = llama(torch.tensor([group.prompt + row.tokens])).logits[0, places]
            logprobs = logits.log_softmax(-1)
            expected.append(logprobs.gather(1, torch.tensor(row.tokens)[:, None])[:, 0])
    mine = scores.node == 3
    torch.testing.assert_close(scores.logprobs[mine], torch.cat(expected), atol=1e-4, rtol=0)


def test_a_packed_pass_has_the_scores_and_the_gradient_of_single_completions() -> None:
    policy, groups = lively(SHAPE, 4), uneven()
    weigh = torch.rand(sum(g.trained for node in groups for g in node), generator=torch.Generator().manual_seed(2))
    packed = policy.scores(groups)
    (packed.logprobs * weigh).sum().backward()  # type: ignore[no-untyped-call]
    gradients = {name: weight.grad for name, weight in policy.weights.items()}
    for weight in policy.weights.values():
        weight.grad = None
    values: list[Tensor] = []
    for node, own in enumerate(groups):
        for group in own:
            for row in group.rows:
                alone: list[list[Group]] = [[] for _ in groups]
                alone[node] = [Group(group.prompt, (row,))]
                values.append(policy.scores(alone).logprobs)
    (torch.cat(values) * weigh).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(packed.logprobs, torch.cat(values), atol=1e-5, rtol=0)
    for name, weight in policy.weights.items():
        torch.testing.assert_close(gradients[name], weight.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_sampled_logprobs_are_those_that_are_scored(temperature: float) -> None:
    policy, prompts = lively(SHAPE, 4), [[group.prompt for group in node] for node in uneven()]
    sampled = policy.sample(prompts, 5, 8, torch.Generator().manual_seed(0), EOS, temperature)
    assert [[len(samples) for samples in node] for node in sampled] == [[5] * len(node) for node in prompts]
    flat = [one for node in sampled for samples in node for one in samples]
    assert all(one.finished == (one.tokens[-1] == EOS) and EOS not in one.tokens[:-1] for one in flat)
    assert all(one.finished or len(one.tokens) == 8 for one in flat)
    groups = [
        [Group(prompt, tuple(Row(one.tokens, 0.0) for one in samples)) for prompt, samples in zip(*both, strict=True)]
        for both in zip(prompts, sampled, strict=True)
    ]
    scores = policy.scores(groups)
    expected = torch.tensor([logprob for one in flat for logprob in one.logprobs])
    torch.testing.assert_close(scores.logprobs.detach(), expected, atol=1e-5, rtol=0)
    if temperature == 0:
        assert all(len({one.tokens for one in samples}) == 1 for node in sampled for samples in node)


def test_tokens_are_drawn_as_often_as_the_policy_says() -> None:
    policy = lively(SHAPE, 1)
    every = Group((3, 1, 2), tuple(Row((token,), 0.0) for token in range(SHAPE.vocabulary)))
    expected = policy.scores([[every]]).logprobs.detach().exp()
    [[samples]] = policy.sample([[(3, 1, 2)]], 4000, 1, torch.Generator().manual_seed(0), EOS)
    drawn = torch.bincount(torch.tensor([one.tokens[0] for one in samples]), minlength=SHAPE.vocabulary) / 4000
    assert float((drawn - expected).abs().max()) < 0.03


def test_one_nodes_groups_change_nothing_for_another() -> None:
    policy, groups = lively(SHAPE, 4), uneven()
    gradients: list[dict[str, Tensor]] = []
    logprobs: list[Tensor] = []
    for others in (groups[3], make_groups(random.Random(5), [8] * 12)):
        scores = policy.scores([groups[0], others, groups[2], []])
        scores.logprobs.sum().backward()  # type: ignore[no-untyped-call]
        logprobs.append(scores.logprobs.detach()[scores.node != 1])
        gradients.append({name: w.grad.clone() for name, w in policy.weights.items() if w.grad is not None})
        for weight in policy.weights.values():
            weight.grad = None
    torch.testing.assert_close(*logprobs, atol=1e-5, rtol=0)
    for name in policy.weights:
        torch.testing.assert_close(gradients[0][name][0], gradients[1][name][0], atol=1e-4, rtol=1e-4)
        assert not gradients[0][name][3].any()


def test_adam_is_that_of_torch_with_each_node_clipped_by_its_own_norm() -> None:
    policy, groups = lively(SHAPE, 4), uneven()
    optimizer = StackedAdam(policy, [1e-2, 1e-2, 1e-2, 3e-3])
    alone = stack([policy])
    reference = [weight.detach()[3].clone().requires_grad_() for weight in policy.weights.values()]
    torchs = torch.optim.AdamW(reference, lr=3e-3, weight_decay=0.0)
    for _ in range(3):
        policy.scores(groups).logprobs.mean().backward()  # type: ignore[no-untyped-call]
        for place, weight in zip(reference, policy.weights.values(), strict=True):
            assert weight.grad is not None
            place.grad = weight.grad[3].clone()
        norm = float(torch.nn.utils.clip_grad_norm_(reference, 0.1))
        torchs.step()
        norms = optimizer.step([True, True, False, True], max_norm=0.1)
        assert norms[3] == pytest.approx(norm)
        assert norm > 0.1
    for after, expected in zip(policy.state(3).values(), reference, strict=True):
        torch.testing.assert_close(after, expected.detach(), atol=1e-6, rtol=1e-5)
    assert all(torch.equal(policy.state(2)[name], alone.state(2)[name]) for name in policy.weights)


def test_a_node_that_is_reset_starts_like_a_new_one() -> None:
    groups = uneven()
    policy = lively(SHAPE, 4)
    start = policy.state(0)
    optimizer = StackedAdam(policy, 1e-2)
    ends: list[dict[str, Tensor]] = []
    for _ in range(2):
        for _ in range(2):
            policy.scores([groups[0], [], [], []]).logprobs.mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step([True, False, False, False])
        ends.append(policy.state(0))
        policy.set_state(0, start)
        optimizer.reset(0)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in start)
    assert any(not torch.equal(ends[0][name], start[name]) for name in start)


def test_nothing_moves_where_a_gradient_is_not_finite() -> None:
    policy, groups = lively(SHAPE, 4), uneven()
    before = stack([policy])
    optimizer = StackedAdam(policy, 1e-2)
    scores = policy.scores(groups)
    (scores.logprobs * (scores.node == 3) * float("inf")).nansum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(FloatingPointError, match="3"):
        optimizer.step()
    assert all(torch.equal(policy.weights[name], before.weights[name]) for name in before.weights)


def test_lessons_are_learnt_each_nodes_its_own_and_kept(tmp_path: Path) -> None:
    def lessons(shift: int) -> Lessons:
        def draw(rng: random.Random, count: int) -> list[tuple[list[int], list[int]]]:
            numbers = [rng.randrange(5) for _ in range(count)]
            return [([30, number], [number + shift, EOS]) for number in numbers]

        return draw

    policy = cached("shift 0", lambda: pretrain(SHAPE, lessons(0), 80, 32, 2e-2, 0), tmp_path)
    policy = cached("shift 0", lambda: pytest.fail("it is there already"), tmp_path).replicate(2)
    specialise(policy, [lessons(0), lessons(8)], 80, 32, 2e-2, [1, 2])
    prompts = [[[30, number] for number in range(5)]] * 2
    answers = policy.sample(prompts, 1, 4, torch.Generator(), EOS, temperature=0.0)
    for shift, node in zip((0, 8), answers, strict=True):
        assert [samples[0].tokens for samples in node] == [(number + shift, EOS) for number in range(5)]


def test_what_does_not_fit_is_refused() -> None:
    policy = lively(SHAPE, 1)
    with pytest.raises(ValueError, match="context"):
        policy.sample([[[1] * 30]], 1, 8, torch.Generator(), EOS)
    with pytest.raises(ValueError, match="1 policies"):
        policy.scores([[], []])
