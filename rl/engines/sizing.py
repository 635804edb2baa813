"""How vLLM is set up for a model, a machine and the rollouts to come: plain arithmetic on plain numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

GIB = 2**30

CPU_SEQUENCES, GPU_SEQUENCES = 128, 256
"""Sequences sampled at once. More than 128 gain little on two cores and cost their memory."""

CPU_BLOCK = 32
"""Tokens in a block of the cache. vLLM takes 128 on a CPU, in which a short prompt fills no block that could be shared;
and 32 is faster there."""

USUAL_PROMPT = 512
"""Tokens of a prompt that the memory is planned for, where the context allows it; of longer ones fewer fit at once."""

HEADROOM = 1.25
CPU_SHARE, GPU_SHARE = 0.25, 0.5
"""Of what is free, the most that the cache may take. The trainer needs the rest."""

ACTIVATIONS = 24
"""Numbers that a forward pass keeps for the backward one, for each token, layer and hidden unit; about."""

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The adapter ranks that vLLM makes room for."""

MIN_CACHE = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides how much memory it takes. `weights` are bytes, `width` bytes a number."""

    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    weights: int
    width: int

    @property
    def token_bytes(self) -> int:
        """Bytes of the key-value cache for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.width


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory in bytes. `capability` is that of an NVIDIA GPU, as 8.0 for Ampere."""

    device: Literal["cpu", "cuda"]
    free: int
    total: int
    capability: float = 0.0


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the settings say. Zeros leave the choice to the machine; `rank` is the adapter's, 0 for none."""

    max_sequences: int
    memory_gb: float
    new_tokens: int
    token_budget: int
    rank: int
    adapter: bool
    dtype: str


def arguments(shape: Shape, machine: Machine, wishes: Wishes, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`, but for the model itself. `given` wins."""
    sequences = wishes.max_sequences or (CPU_SEQUENCES if machine.device == "cpu" else GPU_SEQUENCES)
    room = int(wishes.memory_gb * GIB) or _cache_room(shape, machine, wishes)
    wanted = cache_bytes(shape, sequences, wishes)
    # A whole context must fit the cache, or vLLM does not start.
    length = max(1, min(shape.context, int(room / HEADROOM) // max(1, shape.token_bytes)))
    cache = int(wishes.memory_gb * GIB) or max(min(wanted, room), int(length * shape.token_bytes * HEADROOM), MIN_CACHE)
    chosen: dict[str, Any] = {
        "dtype": _dtype(machine, wishes.dtype),
        "max_num_seqs": sequences,
        "max_model_len": length,
        "kv_cache_memory_bytes": cache,
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "trust_remote_code": False,
        "load_format": "safetensors",
        "seed": 0,
    }
    if machine.device == "cpu":
        # Compiling takes a minute at each start and is no faster then.
        chosen |= {"enforce_eager": True, "block_size": CPU_BLOCK}
    else:
        # vLLM refuses to start if less than this share is free, though the cache's size is given.
        chosen["gpu_memory_utilization"] = utilisation(machine)
    if wishes.adapter:
        rank = next((rank for rank in RANKS if rank >= wishes.rank), wishes.rank)
        chosen |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    return {**chosen, **given}


def cache_bytes(shape: Shape, sequences: int, wishes: Wishes) -> int:
    """Bytes of the key-value cache that `sequences` rollouts want at once, with head-room."""
    each = min(shape.context, wishes.new_tokens + min(USUAL_PROMPT, shape.context // 2))
    return int(sequences * each * shape.token_bytes * HEADROOM)


def utilisation(machine: Machine) -> float:
    """The share of a GPU's memory that vLLM may find free at its start."""
    return round(max(0.01, min(0.9, (machine.free - GIB) / machine.total)), 3)


def training_bytes(shape: Shape, token_budget: int) -> int:
    """About what a learning step allocates beside the weights: activations, and the logits of its tokens twice."""
    layers = token_budget * shape.layers * shape.hidden * ACTIVATIONS * shape.width
    return layers + 2 * token_budget * shape.vocabulary * 4


def _cache_room(shape: Shape, machine: Machine, wishes: Wishes) -> int:
    if machine.device == "cpu":
        return int(max(0, machine.free - shape.weights) * CPU_SHARE)
    free = machine.free - shape.weights - GIB
    # A learning step takes less than it would like if it must: the token budget is halved when memory runs out.
    return max(0, max(free - training_bytes(shape, wishes.token_budget), int(free * (1 - GPU_SHARE))))


def _dtype(machine: Machine, dtype: str) -> str:
    return "float16" if machine.device == "cuda" and dtype == "bfloat16" and machine.capability < 8 else dtype
