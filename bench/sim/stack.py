"""Small Llama policies, N of them on a leading axis, so that one pass over all nodes of a swarm is one batched pass.

The function is that of transformers' LlamaForCausalLM: RMSNorm, rotary positions, SwiGLU, tied embeddings, no biases.
Everything is float32 on the CPU.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.sim.functions import EPSILON, normed, rotary, token_scores
from bench.sim.packed import pack
from rl.batches import Group
from rl.engines.base import Sampled

THETA = 10_000.0
INITIAL = 0.02
"""Standard deviation of untrained weights."""

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""Attention of one layer: its number, rotated queries and keys [N, M, 2 H, D], values [N, M, H D] -> [N, M, H D]."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a policy. `context` is the most tokens of a prompt and its completion together."""

    vocabulary: int
    context: int
    width: int = 64
    layers: int = 3
    heads: int = 4

    @property
    def inner(self) -> int:
        """Width of the SwiGLU: 8/3 of the model's, to the next multiple of eight."""
        return -(-8 * self.width // 24) * 8

    @property
    def head(self) -> int:
        """Dimensions of an attention head."""
        return self.width // self.heads

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Each weight's shape. Queries, keys and values are one matrix, as are SwiGLU's gate and its other factor."""
        sizes: dict[str, tuple[int, ...]] = {"embed": (self.vocabulary, self.width)}
        for layer in range(self.layers):
            sizes |= {
                f"{layer}.attention_norm": (self.width,),
                f"{layer}.qkv": (3 * self.width, self.width),
                f"{layer}.attention_out": (self.width, self.width),
                f"{layer}.mlp_norm": (self.width,),
                f"{layer}.gate_up": (2 * self.inner, self.width),
                f"{layer}.down": (self.width, self.inner),
            }
        return sizes | {"norm": (self.width,)}


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs of the T completion tokens of all nodes' groups, in the order node, group, row, token.

    `logprobs`: [T], nats, with gradient. `node`: [T]. `lengths`: tokens of each row, in the same order; they add up to
    T.
    """

    logprobs: Tensor
    node: Tensor
    lengths: list[int]


class StackedPolicy:
    """N policies of one shape. `weights`: each [N, ...], leaves that require gradients."""

    def __init__(self, shape: Shape, weights: Mapping[str, Tensor]) -> None:
        self.shape = shape
        self.weights = {name: weights[name].detach().clone().requires_grad_() for name in shape.sizes()}
        frequencies = 1.0 / THETA ** (torch.arange(0, shape.head, 2).float() / shape.head)
        angles = torch.outer(torch.arange(shape.context).float(), frequencies)
        self._cos, self._sin = angles.cos(), angles.sin()

    @classmethod
    def random(cls, shape: Shape, seed: int) -> "StackedPolicy":
        """One untrained policy."""
        generator = torch.Generator().manual_seed(seed)
        return cls(
            shape,
            {
                name: torch.ones(1, *size) if len(size) == 1 else INITIAL * torch.randn(1, *size, generator=generator)
                for name, size in shape.sizes().items()
            },
        )

    @property
    def nodes(self) -> int:
        """N."""
        return self.weights["embed"].shape[0]

    def replicate(self, count: int) -> "StackedPolicy":
        """`count` copies of a stack of one."""
        if self.nodes != 1:
            raise ValueError(f"one policy can be replicated, not {self.nodes}")
        return stack([self] * count)

    def state(self, node: int) -> dict[str, Tensor]:
        """A copy of one node's weights, without the leading axis."""
        return {name: weight.detach()[node].clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def set_state(self, node: int, state: Mapping[str, Tensor]) -> None:
        """Overwrite one node's weights."""
        for name, weight in self.weights.items():
            weight[node] = state[name]

    def scores(self, groups: Sequence[Sequence[Group]]) -> Scores:
        """One differentiable pass over all nodes' groups, [node][group]. Raises ValueError for any that is too long."""
        ends = [len(group.prompt) + len(row.tokens) - 1 for node in groups for group in node for row in group.rows]
        self._check(len(groups), max(ends, default=1))
        if not ends:
            nothing = self.weights["embed"].flatten()[:0]
            return Scores(nothing, torch.zeros(0, dtype=torch.long), [])
        packed = pack(groups)
        nodes, places = packed.ids.shape
        width, heads = self.shape.width, self.shape.heads

        def attend(_: int, queries_keys: Tensor, values: Tensor) -> Tensor:
            both = packed.to_blocks(queries_keys.reshape(nodes * places, 2 * width))
            value = packed.to_blocks(values.reshape(nodes * places, width))
            parts: list[Tensor] = []
            start = 0
            for (count, size), mask in zip(packed.shapes, packed.masks, strict=True):
                slots = slice(start, start + count * size)
                q, k = both[slots].view(count, size, 2, heads, -1).permute(2, 0, 3, 1, 4)
                v = value[slots].view(count, size, heads, -1).transpose(1, 2)
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                parts.append(out.transpose(1, 2).reshape(count * size, width))
                start += count * size
            return packed.from_blocks(torch.cat(parts)).view(nodes, places, width)

        hidden = self._layers(packed.ids, packed.positions, attend)
        hidden = packed.to_outputs(hidden.view(nodes * places, width)).view(nodes, -1, width)
        logits = self._logits(hidden).flatten(0, 1)
        logprobs = token_scores(logits, packed.outputs, packed.targets)
        return Scores(logprobs, packed.node, packed.lengths)

    @torch.no_grad()
    def sample(
        self,
        prompts: Sequence[Sequence[Sequence[int]]],
        samples: int,
        max_new_tokens: int,
        generator: torch.Generator,
        eos: int,
        temperature: float = 1.0,
    ) -> list[list[list[Sampled]]]:
        """`samples` completions of each prompt, [node][prompt][sample]; nodes may have different numbers of prompts.

        Temperature 0 takes the likeliest token; log-probs are those at temperature 1. Raises ValueError for prompts
        that are empty or leave too little room.
        """
        lengths = [len(prompt) for node in prompts for prompt in node]
        self._check(len(prompts), max(lengths, default=1) + max_new_tokens - 1)
        if min(lengths, default=1) == 0:
            raise ValueError("a prompt has at least one token")
        if not lengths:
            return [[] for _ in prompts]
        decoder = _Decoder(self, prompts, samples, max_new_tokens)
        tokens, logprobs = decoder.run(generator, eos, temperature)
        rows = [[_cut(*pair, eos) for pair in zip(*both, strict=True)] for both in zip(tokens, logprobs, strict=True)]
        most = max(map(len, prompts))
        return [[rows[node * most + number] for number in range(len(asked))] for node, asked in enumerate(prompts)]

    def _check(self, nodes: int, positions: int) -> None:
        if nodes != self.nodes:
            raise ValueError(f"there are {self.nodes} policies and input for {nodes}")
        if positions > self.shape.context:
            raise ValueError(f"{positions} positions are more than the context of {self.shape.context}")

    def _layers(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states before the last norm, [N, M, width], for ids and positions [N, M]."""
        width, heads = self.shape.width, self.shape.heads
        nodes = len(ids)
        offset = torch.arange(nodes)[:, None] * self.shape.vocabulary
        x = F.embedding(ids + offset, self.weights["embed"].flatten(0, 1))
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        for layer in range(self.shape.layers):
            weight = {name: self.weights[f"{layer}.{name}"] for name in _LAYER}
            qkv = normed(x, weight["attention_norm"], weight["qkv"])
            rotated = rotary(qkv[..., : 2 * width].view(nodes, -1, 2 * heads, self.shape.head), cos, sin)
            attended = attend(layer, rotated, qkv[..., 2 * width :])
            x = torch.baddbmm(x, attended, weight["attention_out"].mT)
            gate, up = normed(x, weight["mlp_norm"], weight["gate_up"]).chunk(2, -1)
            x = torch.baddbmm(x, F.silu(gate) * up, weight["down"].mT)
        return x

    def _logits(self, hidden: Tensor) -> Tensor:
        return normed(hidden, self.weights["norm"], self.weights["embed"])


_LAYER = ("attention_norm", "qkv", "attention_out", "mlp_norm", "gate_up", "down")


class _Decoder:
    """Samples `samples` completions of each of N x P prompts, prompts padded on the right to S tokens.

    A prompt's keys are computed once. Behind them the cache holds, step by step, those of the L completions' tokens;
    a mask lets each completion see its own only.
    """

    def __init__(
        self, policy: StackedPolicy, prompts: Sequence[Sequence[Sequence[int]]], samples: int, max_new_tokens: int
    ) -> None:
        self._policy = policy
        self._samples = samples
        self._steps = max_new_tokens
        most = max(map(len, prompts))
        # A node with fewer prompts gets dummies of one token, which are done from the start.
        rows = [list(prompt) for node in prompts for prompt in [*node, *[[0]] * (most - len(node))]]
        self._dummy = torch.tensor([number >= len(node) for node in prompts for number in range(most)])
        self._lengths = torch.tensor([len(row) for row in rows])
        self._size = size = max(map(len, rows))
        self._ids = torch.tensor([row + [0] * (size - len(row)) for row in rows])
        shape = policy.shape
        cache = (shape.layers, len(rows), shape.heads, size + samples * (max_new_tokens - 1), shape.head)
        self._keys, self._values = torch.empty(cache), torch.empty(cache)
        padding = torch.arange(size) >= self._lengths[:, None]
        own = torch.eye(samples, dtype=torch.bool).repeat(1, max_new_tokens - 1)
        hidden = torch.cat([padding[:, None].expand(-1, samples, -1), ~own.expand(len(rows), -1, -1)], -1)
        self._mask = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)[:, None]

    def run(
        self, generator: torch.Generator, eos: int, temperature: float
    ) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
        """Tokens and log-probs, [N * P][L][at most max_new_tokens]; what follows an EOS is of no meaning."""
        logits = self._prefill()
        done = self._dummy[:, None].expand(-1, self._samples)
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        for step in range(self._steps):
            token, logprob = _draw(logits, generator, temperature)
            tokens.append(token)
            logprobs.append(logprob)
            done = done | (token == eos)
            if step + 1 == self._steps or bool(done.all()):
                break
            logits = self._next(token, step)
        return torch.stack(tokens, -1).tolist(), torch.stack(logprobs, -1).tolist()

    def _prefill(self) -> Tensor:
        """Logits of the first token, [N * P, L, V]."""
        rows, size = self._ids.shape
        shape, nodes = self._policy.shape, self._policy.nodes

        def attend(layer: int, queries_keys: Tensor, values: Tensor) -> Tensor:
            q, k = queries_keys.view(rows, size, 2, shape.heads, -1).permute(2, 0, 3, 1, 4)
            v = values.reshape(rows, size, shape.heads, -1).transpose(1, 2)
            self._keys[layer, :, :, :size], self._values[layer, :, :, :size] = k, v
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.transpose(1, 2).reshape(nodes, -1, shape.width)

        positions = torch.arange(size).repeat(nodes, rows // nodes)
        x = self._policy._layers(self._ids.view(nodes, -1), positions, attend)
        last = x.view(rows, size, -1)[torch.arange(rows), self._lengths - 1]
        logits = self._policy._logits(last.view(nodes, -1, shape.width))
        return logits.view(rows, 1, -1).expand(-1, self._samples, -1)

    def _next(self, tokens: Tensor, step: int) -> Tensor:
        """Logits [N * P, L, V] after the tokens [N * P, L] of a step."""
        rows, samples = tokens.shape
        shape, nodes = self._policy.shape, self._policy.nodes
        begin = self._size + step * samples
        end = begin + samples
        mask = self._mask[..., :end]

        def attend(layer: int, queries_keys: Tensor, values: Tensor) -> Tensor:
            q, k = queries_keys.view(rows, samples, 2, shape.heads, -1).permute(2, 0, 3, 1, 4)
            self._keys[layer, :, :, begin:end] = k
            self._values[layer, :, :, begin:end] = values.reshape(rows, samples, shape.heads, -1).transpose(1, 2)
            keys, seen = self._keys[layer, :, :, :end], self._values[layer, :, :, :end]
            out = F.scaled_dot_product_attention(q, keys, seen, attn_mask=mask)
            return out.transpose(1, 2).reshape(nodes, -1, shape.width)

        positions = (self._lengths + step)[:, None].expand(-1, samples).reshape(nodes, -1)
        x = self._policy._layers(tokens.view(nodes, -1), positions, attend)
        return self._policy._logits(x).view(rows, samples, -1)


def _draw(logits: Tensor, generator: torch.Generator, temperature: float) -> tuple[Tensor, Tensor]:
    """One token of each distribution [..., V], and its log-prob at temperature 1."""
    if temperature == 0:
        token = logits.argmax(-1, keepdim=True)
    else:
        mass = (logits / temperature).softmax(-1).cumsum(-1)
        point = torch.rand(*mass.shape[:-1], 1, generator=generator) * mass[..., -1:]
        # Rounding may take the point to the very end, behind which there is no token.
        token = torch.searchsorted(mass, point, right=True).clamp_(max=mass.shape[-1] - 1)
    logprob = logits.gather(-1, token) - logits.logsumexp(-1, keepdim=True)
    return token.squeeze(-1), logprob.squeeze(-1)


def _cut(tokens: list[int], logprobs: list[float], eos: int) -> Sampled:
    finished = eos in tokens
    end = tokens.index(eos) + 1 if finished else len(tokens)
    return Sampled(tuple(tokens[:end]), tuple(logprobs[:end]), finished)


def stack(policies: Sequence[StackedPolicy]) -> StackedPolicy:
    """All nodes of these stacks, in order, as one. They are of one shape."""
    [shape] = {policy.shape for policy in policies}
    return StackedPolicy(
        shape, {name: torch.cat([policy.weights[name].detach() for policy in policies]) for name in shape.sizes()}
    )


def export(policy: StackedPolicy, node: int, directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write one node's policy and its tokenizer as a model directory that transformers loads."""
    shape, state = policy.shape, policy.state(node)
    special: dict[str, Any] = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=True,
        dtype="float32",
        **special,
    )
    make: Any = LlamaForCausalLM
    model: LlamaForCausalLM = make(config)
    model.load_state_dict(_transformers_names(state, shape.layers))
    # Nothing about sampling: whoever generates says how.
    model.generation_config = GenerationConfig(**special)  # type: ignore[no-untyped-call]
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _transformers_names(state: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    named = {
        "model.embed_tokens.weight": state["embed"],
        "lm_head.weight": state["embed"],
        "model.norm.weight": state["norm"],
    }
    for layer in range(layers):
        q, k, v = state[f"{layer}.qkv"].chunk(3)
        gate, up = state[f"{layer}.gate_up"].chunk(2)
        parts = {
            "input_layernorm": state[f"{layer}.attention_norm"],
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": state[f"{layer}.attention_out"],
            "post_attention_layernorm": state[f"{layer}.mlp_norm"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": state[f"{layer}.down"],
        }
        named |= {f"model.layers.{layer}.{name}.weight": weight for name, weight in parts.items()}
    return named
