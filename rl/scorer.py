"""The pass of a model over a micro-batch, and whether it gives what the model itself would give."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rl.batches import Group, MicroBatch, Row, collate
from rl.errors import ModelError
from rl.head import token_scores
from rl.models import ResolvedModel
from rl.work import is_out_of_memory

log = logging.getLogger(__name__)

LAYOUT_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Nats by which log-probs of the same tokens may differ on average between two ways to compute them, when these are
compared at the start: above the type's noise, below what attending to the wrong tokens does."""

PACKABLE = {"full_attention", "sliding_attention"}
"""Kinds of layers that can be told which positions see which."""


class Scorer:
    """A causal language model of transformers as something that scores completion tokens."""

    def __init__(self, model: Any, resolved: ResolvedModel) -> None:
        self.model = model
        self._resolved = resolved
        self.packing = False
        """Whether micro-batches are packed; `find_packing` says whether the model can."""
        self._twice: list[GradientCheckpointingLayer] = []

    def collate(self, parts: Sequence[Group]) -> MicroBatch:
        """The tensors of one micro-batch."""
        return collate(parts, self._resolved.device, packing=self.packing)

    def score(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy, both [N] float32, of a micro-batch's completion tokens; the first carries gradient."""
        options: dict[str, Any] = {}
        if batch.packed is not None:
            # A mask of four dimensions is left as it is: the attention knows better.
            options = {"packed": batch.packed, "attention_mask": batch.ids.new_ones(1, 1, 1, 1)}
        options |= {"input_ids": batch.ids, "position_ids": batch.positions, "use_cache": False}
        with self._layers_computed_twice():
            output = self.model.get_decoder()(**options)
        hidden = output.last_hidden_state.flatten(0, 1)[batch.sources]
        return token_scores(self.model.get_output_embeddings(), hidden, batch.targets)

    def compute_twice(self) -> bool:
        """From now on keep of each layer its input alone, and compute the rest again on the way back: a fraction of the
        memory for a third more time. False if that is so already, or this model cannot.
        """
        if self._twice or not self.model.supports_gradient_checkpointing:
            return False
        self.model.gradient_checkpointing_enable()
        self._twice = [layer for layer in self.model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        return bool(self._twice)

    @contextmanager
    def _layers_computed_twice(self) -> Iterator[None]:
        """Layers do it in training alone. What is in them stays in eval mode, and so do they when they sample."""
        training = torch.is_grad_enabled()
        for layer in self._twice:
            layer.training = training
        try:
            yield
        finally:
            for layer in self._twice:
                layer.training = False

    def find_packing(self, vocabulary: int) -> None:
        """Pack groups if the model gives the same log-probs for a packed one as for its rows; says so if not.

        `vocabulary` token ids, from 0, may be used to find out. Raises ModelError if its log-probs are others than
        those of `score` at all.
        """
        # Long enough that a window would be noticed.
        prompt = 6 + (_window(self.model.config) or 0)
        ids = [(17 * i + 5) % vocabulary for i in range(prompt + 18)]
        rows = tuple(Row(tuple(ids[start : start + 6]), 0.0) for start in range(prompt, prompt + 18, 6))
        group = Group(tuple(ids[:prompt]), rows)
        self.packing = False
        with torch.no_grad():
            apart = torch.cat([self._logprobs(Group(group.prompt, (row,))) for row in rows])
            # A short text will do: this one has all logits.
            self._check_head(Group(group.prompt[:6], rows[:1]))
            self.packing = _kinds(self.model.config) <= PACKABLE
            if self.packing:
                self.packing = self._packs(group, apart)
        if not self.packing:
            log.warning(
                "this model's attention takes no packed groups: each completion repeats its prompt, which is slower"
            )

    def _packs(self, group: Group, apart: Tensor) -> bool:
        try:
            return self._agree(self._logprobs(group), apart)
        # Of a model that hands nothing on to its attention, or of an attention that does more than ours, or that takes
        # what is no mask for one.
        except (TypeError, ValueError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            log.debug("packed groups: %s", error)
            return False

    def _logprobs(self, group: Group) -> Tensor:
        return self.score(self.collate([group]))[0]

    def _check_head(self, group: Group) -> None:
        """The logits are taken from the output layer, at the positions needed; a model that alters them is refused."""
        batch = self.collate([group])
        logits = self.model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False).logits[0].float()
        whole = torch.log_softmax(logits[batch.sources], -1).gather(-1, batch.targets[:, None])[:, 0]
        if not self._agree(whole, self.score(batch)[0]):
            raise ModelError(
                f"{self._resolved.identity} changes its logits after the output layer; choose another model"
            )

    def _agree(self, one: Tensor, other: Tensor) -> bool:
        return bool((one - other).abs().mean() <= LAYOUT_TOLERANCE[self._resolved.dtype])


def _kinds(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ["full_attention"])


def _window(config: Any) -> int | None:
    return getattr(config, "sliding_window", None) if "sliding_attention" in _kinds(config) else None
