"""A model that transformers saved as one GGUF file, the format of llama.cpp and of what builds on it.

The converter of llama.cpp is no package that could be depended on (what PyPI has of it puts files of its own in place
of those of `gguf`), so the few models that this project knows are converted here: those built as Llama or Qwen2, with
byte-level BPE. Weights keep their precision; llama.cpp's own tool makes smaller ones of such a file.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from rl.errors import ModelError

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
"""By the `model_type` of transformers."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {_CONTRACTIONS + r"\p{N}" + _OTHERS: "qwen2", _CONTRACTIONS + r"\p{N}{1,3}" + _OTHERS: "llama-bpe"}
"""What a tokenizer splits text by before BPE, and the name that llama.cpp has for it."""


def write_gguf(directory: Path, path: Path, name: str) -> None:
    """Write the model and tokenizer that `save_pretrained` put into `directory` to `path`. `name` is told in the file.

    Raises ModelError for what GGUF, or this function, has no form for; OSError.
    """
    config: Any = AutoConfig.from_pretrained(directory)
    architecture = _architecture(config)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name(name)
    _add_config(writer, config)
    _add_tokenizer(writer, AutoTokenizer.from_pretrained(directory), int(config.vocab_size))
    _add_weights(writer, config, architecture, directory / "model.safetensors")
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _architecture(config: Any) -> gguf.MODEL_ARCH:
    kind = str(config.model_type)
    if kind not in ARCHITECTURES:
        raise ModelError(f"a {kind} model has no GGUF form here ({', '.join(ARCHITECTURES)} have): leave --format out")
    if (scaling := config.rope_parameters.get("rope_type", "default")) != "default":
        raise ModelError(f"rotary positions of type {scaling} have no GGUF form here: leave --format out")
    if getattr(config, "use_sliding_window", False) or getattr(config, "mlp_bias", False):
        raise ModelError("sliding windows and biases of the MLP have no GGUF form here: leave --format out")
    return ARCHITECTURES[kind]


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _add_config(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_vocab_size(config.vocab_size)
    exact = config.dtype in (None, torch.float32)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if exact else gguf.LlamaFileType.MOSTLY_BF16)


def _add_tokenizer(writer: Any, tokenizer: Any, size: int) -> None:
    """`size` is that of the model's output layer, which is often padded."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    pre = _pre_tokenizer(backend)
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [int(gguf.TokenType.UNUSED)] * size
    for token, number in backend["model"]["vocab"].items():
        tokens[number], types[number] = token, int(gguf.TokenType.NORMAL)
    for added in backend["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = int(gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED)
    merges = backend["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    for number, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):
        if number is not None:
            add(number)
    writer.add_add_bos_token(tokenizer("a").input_ids[0] == tokenizer.bos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _pre_tokenizer(backend: dict[str, Any]) -> str:
    """The name llama.cpp has for how a tokenizer splits text. Raises ModelError if it has none."""
    step = backend["pre_tokenizer"] or {}
    steps = step["pretokenizers"] if step.get("type") == "Sequence" else [step]
    kinds = [one.get("type") for one in steps]
    is_bpe = backend["model"]["type"] == "BPE" and backend["model"]["merges"]
    if is_bpe and kinds[-1] == "ByteLevel" and not steps[-1]["add_prefix_space"]:
        if kinds == ["ByteLevel"]:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and (name := _PATTERNS.get(steps[0]["pattern"].get("Regex", ""))):
            return name
    raise ModelError(
        "the tokenizer of this model has no GGUF form here, only byte-level BPE as in SmolLM2, Qwen and Llama 3 has:"
        " leave --format out"
    )


def _add_weights(writer: Any, config: Any, architecture: gguf.MODEL_ARCH, path: Path) -> None:
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a mapping
            known = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if known is None:
                raise ModelError(f"the weight {name} of this model has no name in GGUF: leave --format out")
            tensor = file.get_tensor(name)
            if architecture is gguf.MODEL_ARCH.LLAMA and (count := heads.get(name.split(".")[-2])):
                tensor = _rotary_pairs(tensor, count)
            values = tensor.float().numpy()
            if tensor.dim() == 1 or tensor.dtype == torch.float32:
                writer.add_tensor(known, values)
            else:
                kind = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(known, gguf.quantize(values, kind), raw_dtype=kind)


def _rotary_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in llama.cpp's order: the two of a rotary pair side by side, in each head.

    transformers has the first halves of all pairs of a head before the second ones.
    """
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape).contiguous()
