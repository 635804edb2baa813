"""Log-probs and entropies of single tokens from hidden states, without ever holding all logits.

The logits of N tokens over a vocabulary V are the largest tensor of a small model's learning step. Here they exist only
for a piece of the tokens at a time, and where the output layer is frozen, as under LoRA, what the backward pass needs
of them is one vector of the model's width for each token, which the forward pass leaves behind.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 2**24
"""Elements of the logits held at once: 64 MiB in float32, and still enough rows to keep a matrix product busy."""

LOGITS_IN_CACHE = 2**20
"""Elements of the logits that are gone over at once where that is several passes, on a CPU bound by memory."""


def token_scores(head: Any, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` [N] and entropies [N], in nats and at least float32, from hidden states [N, d].

    `head` is the model's output layer, [N, d] to [N, V]. The log-probs carry a gradient, the entropies none.
    """
    if type(head) is nn.Linear and head.bias is None and not head.weight.requires_grad:
        logprobs, entropies = _FrozenHead.apply(hidden, head.weight, targets)
        return logprobs, entropies
    rows = max(1, LOGITS_AT_ONCE // head(hidden[:1]).shape[-1])
    pieces = [
        checkpoint(_piece, head, h, t, use_reentrant=False)
        for h, t in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    ]
    return torch.cat([logprob for logprob, _ in pieces]), torch.cat([entropy for _, entropy in pieces])


def _piece(head: Any, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    with torch.no_grad():
        probabilities = torch.exp(logits - normaliser[:, None])
        return logprobs, normaliser - torch.linalg.vecdot(probabilities, logits)


class _FrozenHead(torch.autograd.Function):
    """A token's log-prob depends on its own hidden state alone, so its derivative is one row: W[target] - p W."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(hidden), dtype=exact, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        derivative = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        rows = max(1, LOGITS_AT_ONCE // len(weight))
        each = max(1, LOGITS_IN_CACHE // len(weight)) if weight.device.type == "cpu" else rows
        for start in range(0, len(hidden), rows):
            piece = slice(start, start + rows)
            logits = hidden[piece] @ weight.T
            chosen = targets[piece, None]
            for few in range(0, len(logits), each):
                within = slice(few, few + each)
                some = slice(start + few, start + min(few + each, len(logits)))
                scores = logits[within].to(logprobs.dtype)
                probabilities = scores.softmax(-1)
                # The likeliest token is at least as likely as 1 / V, so its logarithm is exact where others' are not.
                normaliser = scores.amax(-1) - probabilities.amax(-1).log()
                logprobs[some] = scores.gather(-1, chosen[within])[:, 0] - normaliser
                entropies[some] = normaliser - scores.mul_(probabilities).sum(-1)
                if derivative is not None:
                    logits[within] = probabilities
            if derivative is not None:
                torch.sub(weight[targets[piece]], logits @ weight, out=derivative[piece])
        ctx.save_for_backward(derivative)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, None, None]:
        (derivative,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return (logprobs[:, None] * derivative).to(derivative.dtype), None, None
