"""The attention that models of transformers are given in place of PyTorch's: for packed groups, and for decoding.

Groups that are packed for a learning step go tile by tile (`rl.packed`). Decoding on a CPU is two batched matrix
products: PyTorch's CPU kernel takes 2.5 times as long for a single query token, and this is half of a decoding step.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rl.packed import attend
from rl.tiles import Packed

NAME = "swarmnode"


def use_own_attention(model: Any) -> None:
    """Let a model of transformers decode this way, and take `packed` groups; all else it does stays as it was.

    Models whose attention is not PyTorch's plain one are left alone.
    """
    if model.config._attn_implementation == "sdpa":
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
    packed: Packed | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` [B, heads, Q, d] over `key`, `value` [B, kv heads, K, d]; returns [B, Q, heads, d].

    `attention_mask` is None, boolean [B, 1, Q, K] (True is seen) or additive; beside `packed` groups (B = 1) it says
    nothing. On a CPU a single query token that needs no gradient is computed here: the query heads that share a key
    head are the rows of one product.
    """
    batch, heads, queries, width = query.shape
    if packed is not None:
        if options.get("softcap") is not None or options.get("position_bias") is not None:
            raise ValueError("packed groups know neither soft caps nor biases of positions")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query[0], key[0], value[0], packed, scale, options.get("sliding_window"))[None], None
    additive = attention_mask is not None and attention_mask.dtype != torch.bool
    biased = options.get("position_bias") is not None
    elsewhere = query.device.type != "cpu"
    if queries != 1 or elsewhere or torch.is_grad_enabled() or scaling is None or additive or biased:
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
