"""What a learning step counts while it goes over tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rl.batches import Row


@dataclass(slots=True)
class Totals:
    """Sums over the tokens of one optimiser step (`gap`: over all tokens with a sampled log-prob, first pass only)."""

    loss: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    tokens: int = 0
    gap: float = 0.0
    gap_tokens: int = 0

    def add_gap(self, row: Row, logprobs: Tensor) -> None:
        """Count how far the engine was from these log-probs of the row's tokens, if it reported any."""
        if row.sampled is not None:
            self.gap += float((logprobs - torch.tensor(row.sampled, device=logprobs.device)).abs().sum())
            self.gap_tokens += len(row.tokens)

    @classmethod
    def of(cls, parts: Sequence["Totals"]) -> "Totals":
        """The sum of the parts."""
        return cls(**{f.name: sum(getattr(part, f.name) for part in parts) for f in fields(cls)})
