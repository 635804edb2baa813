"""Packed groups against their rows one by one, on small models of several families with random weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from rl.attention import use_own_attention
from rl.batches import Group
from rl.models import ResolvedModel
from rl.scorer import Scorer
from tests.rl.learning import make_groups

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "mistral, a window of 8": MistralConfig(**SMALL, head_dim=8, sliding_window=8),
    "gemma3, a window of 8": Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "deepseek, whose values are narrower than its keys": DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 4},
        first_k_dense_replace=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}


def scorer_of(config: PretrainedConfig, dtype: torch.dtype) -> Scorer:
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model: Any = auto.from_config(config, attn_implementation="sdpa").to(dtype).eval()
    use_own_attention(model)
    return Scorer(model, ResolvedModel("random", Path(), None, "cpu", dtype))


def scores_and_gradients(scorer: Scorer, groups: list[Group], packing: bool) -> tuple[Tensor, list[Tensor]]:
    scorer.packing = packing
    parts = groups if packing else [Group(group.prompt, (row,)) for group in groups for row in group.rows]
    scorer.model.zero_grad()
    logprobs, _ = scorer.score(scorer.collate(parts))
    weights = torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)
    (logprobs * weights).sum().backward()  # type: ignore[no-untyped-call]
    return logprobs.detach(), [p.grad.clone() for p in scorer.model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_groups_give_what_their_rows_give(family: str, dtype: torch.dtype, tolerance: float) -> None:
    scorer = scorer_of(FAMILIES[family], dtype)
    packed, packed_gradients = scores_and_gradients(scorer, make_groups(), packing=True)
    apart, gradients = scores_and_gradients(scorer, make_groups(), packing=False)
    assert (packed - apart).abs().max() <= tolerance
    assert len(packed_gradients) == len(gradients)
    for one, other in zip(packed_gradients, gradients, strict=True):
        assert torch.linalg.vector_norm(one - other) <= tolerance * (1 + torch.linalg.vector_norm(other))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_packs_is_known(family: str) -> None:
    scorer = scorer_of(FAMILIES[family], torch.float32)
    scorer.find_packing(256)
    assert scorer.packing


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, head_dim=16, sliding_window=64, final_logit_softcapping=None),
        StableLmConfig(**SMALL),
        NemotronConfig(**SMALL),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_with_another_attention_does_not_pack(config: PretrainedConfig) -> None:
    scorer = scorer_of(config, torch.float32)
    scorer.find_packing(256)
    assert not scorer.packing
