"""The learning step's loss: a pure function over tensors, clipped policy gradient with optional KL (GRPO).

Everything is a flat list of N completion tokens, however they were batched. Token weights are computed for a whole
optimiser step beforehand, so that micro-batches add up to the step, whatever the split. See arXiv 2402.03300.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """N completion tokens, all tensors of shape [N] in float32.

    `logprobs` carries the gradient; `old_logprobs` are those of the policy before the update, `reference` those of the
    base model (needed only with KL). `weights` says how much each token counts in the average.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossTerms:
    """`loss` is a scalar with gradient; `clipped` counts tokens, `kl` sums nats over tokens."""

    loss: Tensor
    clipped: Tensor
    kl: Tensor


def policy_loss(batch: TokenBatch, clip_low: float, clip_high: float, kl: float = 0.0) -> LossTerms:
    """Weighted sum over tokens of -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) + kl k3.

    ratio = exp(logprobs - old_logprobs), k3 = exp(r) - r - 1 with r = reference - logprobs. A token counts as clipped
    where the clip has taken its gradient. Raises ValueError if `kl` is set and there is no reference.
    """
    ratio = torch.exp(batch.logprobs - batch.old_logprobs)
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = ratio * batch.advantages
    clipped_surrogate = bounded * batch.advantages
    token_loss = -torch.minimum(surrogate, clipped_surrogate)
    divergence = torch.zeros(())
    if kl > 0:
        if batch.reference is None:
            raise ValueError("a KL term needs the reference's log-probs")
        distance = batch.reference - batch.logprobs
        k3 = torch.exp(distance) - distance - 1.0
        token_loss = token_loss + kl * k3
        divergence = k3.detach().sum()
    return LossTerms(
        loss=(batch.weights * token_loss).sum(),
        clipped=(clipped_surrogate < surrogate).sum(),
        kl=divergence,
    )


def token_weights(lengths: Sequence[int], kind: Literal["dapo", "grpo", "dr_grpo"], max_new_tokens: int) -> list[float]:
    """The weight of each token of each completion, from the lengths of all completions of one optimiser step.

    `dapo` (arXiv 2503.14476): 1 / tokens of all completions. `grpo` (arXiv 2402.03300): 1 / (completions x own length).
    `dr_grpo` (arXiv 2503.20783): 1 / (completions x max_new_tokens). Every length is at least 1.
    """
    total, count = sum(lengths), len(lengths)
    if kind == "dapo":
        return [1.0 / total] * count
    if kind == "grpo":
        return [1.0 / (count * length) for length in lengths]
    return [1.0 / (count * max_new_tokens)] * count
