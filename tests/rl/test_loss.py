import math
from typing import Literal

import pytest
import torch

from rl.loss import TokenBatch, policy_loss, token_weights


def batch(ratios: list[float], advantages: list[float], reference: list[float] | None = None) -> TokenBatch:
    logprobs = torch.tensor(ratios).log().requires_grad_()
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=torch.zeros(len(ratios)),
        advantages=torch.tensor(advantages),
        weights=torch.full((len(ratios),), 1 / len(ratios)),
        reference=None if reference is None else torch.tensor(reference),
    )


def test_clipping_on_both_sides() -> None:
    # Ratio and advantage of four tokens: free, clipped above, clipped below, and outside on the harmless side.
    b = batch([1.1, 1.5, 0.5, 0.5], [2.0, 2.0, -1.0, 3.0])
    terms = policy_loss(b, 0.2, 0.28)
    assert terms.loss.item() == pytest.approx(-(1.1 * 2 + 1.28 * 2 + 0.8 * -1 + 0.5 * 3) / 4)
    assert terms.clipped.item() == 2
    terms.loss.backward()  # type: ignore[no-untyped-call]
    # d ratio / d logprob is the ratio; clipped tokens have no gradient.
    assert b.logprobs.grad is not None
    assert b.logprobs.grad.tolist() == pytest.approx([-1.1 * 2 / 4, 0, 0, -0.5 * 3 / 4])


def test_kl_is_k3_of_the_reference() -> None:
    b = batch([1.0, 1.0], [0.0, 0.0], reference=[0.5, -0.25])
    terms = policy_loss(b, 0.2, 0.28, kl=0.1)
    expected = [math.exp(0.5) - 1.5, math.exp(-0.25) - 0.75]
    assert terms.kl.item() == pytest.approx(sum(expected))
    assert terms.loss.item() == pytest.approx(0.1 * sum(expected) / 2)


def test_kl_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="reference"):
        policy_loss(batch([1.0], [1.0]), 0.2, 0.28, kl=0.1)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("dapo", [1 / 8, 1 / 8, 1 / 8]),
        ("grpo", [1 / 3, 1 / 6, 1 / 15]),
        ("dr_grpo", [1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_normalisations(kind: Literal["dapo", "grpo", "dr_grpo"], weights: list[float]) -> None:
    assert token_weights([1, 2, 5], kind, 10) == pytest.approx(weights)
