"""The pass of a model over a micro-batch, and whether it gives what the model itself would give."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl.batches import Group, MicroBatch, Row, collate
from rl.errors import ModelError
from rl.head import token_scores
from rl.models import ResolvedModel

log = logging.getLogger(__name__)

LAYOUT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Nats by which log-probs of the same tokens may differ on average between two ways to compute them, when these are
compared at the start: above the type's noise, below what attending to the wrong tokens does."""


class Scorer:
    """A causal language model of transformers as something that scores completion tokens."""

    def __init__(self, model: Any, resolved: ResolvedModel) -> None:
        self.model = model
        self._resolved = resolved

    def collate(self, parts: Sequence[Group]) -> MicroBatch:
        """The tensors of one micro-batch."""
        return collate(parts, self._resolved.device, self._resolved.dtype)

    def score(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy, both [N] float32, of a micro-batch's completion tokens; the first carries gradient."""
        output = self.model.get_decoder()(
            input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False
        )
        hidden = output.last_hidden_state.flatten(0, 1)[batch.sources]
        return token_scores(self.model.get_output_embeddings(), hidden, batch.targets)

    def takes_block_mask(self, vocabulary: int) -> bool:
        """Whether the model gives the same log-probs for a packed group as for its rows; says so if not.

        `vocabulary` token ids, from 0, may be used to find out. Raises ModelError if its log-probs are others than
        those of `score` at all.
        """
        kinds = getattr(self.model.config, "layer_types", None) or ["full_attention"]
        ids = [(17 * i + 5) % vocabulary for i in range(24)]
        rows = tuple(Row(tuple(ids[start : start + 6]), 0.0) for start in (6, 12, 18))
        group = Group(tuple(ids[:6]), rows)
        with torch.no_grad():
            apart = torch.cat([self._logprobs(Group(group.prompt, (row,))) for row in rows])
            self._check_head(group)
            together = self._logprobs(group) if set(kinds) == {"full_attention"} else apart + math.inf
        agree = self._agree(together, apart)
        if not agree:
            log.warning(
                "this model's attention takes no block mask: each completion repeats its prompt, which is slower"
            )
        return agree

    def _logprobs(self, group: Group) -> Tensor:
        return self.score(self.collate([group]))[0]

    def _check_head(self, group: Group) -> None:
        """The logits are taken from the output layer, at the positions needed; a model that alters them is refused."""
        batch = self.collate([Group(group.prompt, group.rows[:1])])
        logits = self.model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False).logits[0].float()
        whole = torch.log_softmax(logits[batch.sources], -1).gather(-1, batch.targets[:, None])[:, 0]
        if not self._agree(whole, self.score(batch)[0]):
            raise ModelError(
                f"{self._resolved.identity} changes its logits after the output layer; choose another model"
            )

    def _agree(self, one: Tensor, other: Tensor) -> bool:
        return bool((one - other).abs().mean() <= LAYOUT_TOLERANCE[self._resolved.dtype])
