"""Attention for decoding on a CPU: two batched matrix products.

PyTorch's CPU kernel takes 2.5 times as long for a single query token, and this is half of a decoding step.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "swarmnode_decode"


def use_fast_decoding(model: Any) -> None:
    """Let a model of transformers on a CPU decode this way; everything else it does stays as it was.

    Models whose attention is not PyTorch's plain one are left alone.
    """
    if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` [B, heads, Q, d] over `key`, `value` [B, kv heads, K, d]; returns [B, Q, heads, d].

    `attention_mask` is None, boolean [B, 1, Q, K] (True is seen) or additive. A single query token that needs no
    gradient is computed here: the query heads that share a key head are the rows of one product.
    """
    batch, heads, queries, width = query.shape
    additive = attention_mask is not None and attention_mask.dtype != torch.bool
    biased = options.get("position_bias") is not None
    if queries != 1 or torch.is_grad_enabled() or scaling is None or additive or biased:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output, None
    shared = query.reshape(batch, key.shape[1], -1, width)
    scores = torch.matmul(shared, key.transpose(2, 3)).float() * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    mixed = torch.matmul(scores.softmax(-1).to(value.dtype), value)
    return mixed.reshape(batch, 1, heads, value.shape[-1]), None
