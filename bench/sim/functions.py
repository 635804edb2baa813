"""What a stacked Llama computes that torch has no batched function for, with gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-6
"""Of the RMSNorm."""


def normed(x: Tensor, norm: Tensor, matrix: Tensor) -> Tensor:
    """RMSNorm and a matrix: [N, M, in] -> [N, M, out]. The norm's weights go into the matrix, which is smaller."""
    return F.rms_norm(x, (x.shape[-1],), eps=EPSILON) @ (matrix * norm[:, None]).mT


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: [..., D] with cos and sin [..., D / 2]; the halves of a head are the pairs' two sides."""
    rotated: Tensor = _Rotated.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradients[0], cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    out = torch.empty(x.shape)
    first, second = out.chunk(2, -1)
    torch.mul(one, cos, out=first).addcmul_(other, sin, value=-1)
    torch.mul(other, cos, out=second).addcmul_(one, sin)
    return out


def token_scores(logits: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
    """Log-probs of `targets` [T] at the places `outputs` [T] of logits [U, V]."""
    logprobs: Tensor = _TokenScores.apply(logits, outputs, targets)  # type: ignore[no-untyped-call]
    return logprobs


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        logprobs = logits.log_softmax(-1)
        ctx.save_for_backward(logprobs, outputs, targets)
        return logprobs[outputs, targets]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logprobs, outputs, targets = ctx.saved_tensors
        gradient = gradients[0]
        mass = torch.zeros(len(logprobs)).index_add_(0, outputs, gradient)
        out = logprobs.exp().mul_(-mass[:, None])
        out.view(-1).index_add_(0, outputs * out.shape[1] + targets, gradient)
        return out, None, None
