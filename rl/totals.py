"""What a learning step knows of its tokens before it goes over them, and what it counts while it does."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from rl.batches import Row
from rl.loss import LossTerms, TokenBatch

MAX_STALE_RATIO = 2.0
"""Truncated importance sampling (Ionides, 2008): the ratio of a token that the policy that sampled it found unlikely is
not bounded by the clipping where its advantage is negative, and rounding in the engine alone can make it large."""


@dataclass(slots=True)
class Known:
    """Log-probs computed before the first optimiser step: of the old policy and of the base model."""

    old: Mapping[Row, Tensor] = field(default_factory=dict)
    reference: Mapping[Row, Tensor] = field(default_factory=dict)

    def token_batch(self, rows: Sequence[Row], logprobs: Tensor, weights: Mapping[Row, float]) -> TokenBatch:
        """What the loss needs of these rows' tokens, [N], from their log-probs now and the weight of each token of a
        row. The old policy of a stale row is the one that sampled it, at most MAX_STALE_RATIO from the one of now. That
        of the others is the one known as old, or if none is, the one of now.
        """
        counts = torch.tensor([len(row.tokens) for row in rows], device=logprobs.device)

        def spread(values: list[float]) -> Tensor:
            return torch.tensor(values, device=logprobs.device).repeat_interleave(counts)

        def recall(values: Mapping[Row, Tensor]) -> Tensor:
            return torch.cat([values[row] for row in rows])

        return TokenBatch(
            logprobs=logprobs,
            old_logprobs=_old(rows, recall(self.old) if self.old else logprobs.detach(), logprobs.detach()),
            advantages=spread([row.advantage for row in rows]),
            weights=spread([weights[row] for row in rows]),
            reference=recall(self.reference) if self.reference else None,
        )


@dataclass(slots=True)
class Totals:
    """Sums over the tokens of one optimiser step (`gap`: over all tokens with a sampled log-prob, first pass only).

    `norm` is that of its gradient before clipping.
    """

    loss: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    tokens: int = 0
    gap: float = 0.0
    gap_tokens: int = 0
    norm: float = 0.0

    def add(self, rows: Sequence[Row], terms: LossTerms, logprobs: Tensor, entropy: Tensor) -> None:
        """Count the tokens of a micro-batch's rows; `logprobs` and `entropy`: [N]."""
        self.loss += float(terms.loss.detach())
        self.clipped += float(terms.clipped)
        self.kl += float(terms.kl)
        self.entropy += float(entropy.sum())
        self.tokens += len(logprobs)
        for row, values in zip(rows, torch.split(logprobs, [len(row.tokens) for row in rows]), strict=True):
            self.add_gap(row, values)

    def add_gap(self, row: Row, logprobs: Tensor) -> None:
        """Count how far the engine was from these log-probs of the row's tokens, if it reported any."""
        if row.sampled is not None and not row.stale:
            self.gap += float((logprobs - torch.tensor(row.sampled, device=logprobs.device)).abs().sum())
            self.gap_tokens += len(row.tokens)

    @classmethod
    def of(cls, parts: Sequence["Totals"]) -> "Totals":
        """The sum of the parts."""
        return cls(**{f.name: sum(getattr(part, f.name) for part in parts) for f in fields(cls)})


def _old(rows: Sequence[Row], old: Tensor, now: Tensor) -> Tensor:
    """Log-probs of the old policy, [N]: `old`, but of stale rows what their sampler said, truncated against `now`."""
    if not any(row.stale for row in rows):
        return old
    parts = list(torch.split(old, [len(row.tokens) for row in rows]))
    for place, (row, current) in enumerate(zip(rows, torch.split(now, [len(row.tokens) for row in rows]), strict=True)):
        if row.stale:
            reported = torch.tensor(row.sampled, device=now.device)
            parts[place] = torch.maximum(reported, current - math.log(MAX_STALE_RATIO))
    return torch.cat(parts)
