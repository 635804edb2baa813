"""The settings of the learning side, each field followed by what it means. `node.config` puts them into one tree."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rl.rollouts import MAX_GROUP, MIN_GROUP

Positive = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(gt=0.0, le=0.99999)]


class Section(BaseModel):
    """A section of the configuration: unknown keys are refused, values are checked, nothing changes afterwards.

    Upper bounds are far above any sensible value. They keep arithmetic finite and memory within what a typing error may
    ask for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ModelSettings(Section):
    """[model]: which language model this node trains."""

    name: str = "auto"
    """`auto`, `tiny`, a local directory, or a hub id such as `Qwen/Qwen2.5-0.5B-Instruct`."""

    revision: str | None = None
    """A branch, tag or commit on the hub."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the policy lives. `auto` takes a GPU where there is one."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` takes bfloat16 where the hardware computes faster in it."""


class LoraSettings(Section):
    """[lora]: the adapter (arXiv 2106.09685)."""

    rank: int = Field(default=16, ge=0, le=512)
    """Rank of the adapter; 0 trains every weight of the model instead."""

    alpha: float = Field(default=32.0, gt=0, le=1e4)
    """Scale: the adapter's output is multiplied by alpha / rank."""

    targets: str | list[str] = "all-linear"
    """The linear layers that get an adapter: `all-linear`, or module names such as `q_proj`."""


class PromptSettings(Section):
    """[prompt]: how this node shows a task to its policy. Other nodes need not know: only the question travels."""

    system: str = "Reply with the final answer only."
    """System message; empty for none."""

    shots: Literal[0, 1] = 1
    """Solved examples of the same kind shown before the question."""


class SamplingSettings(Section):
    """[sampling]: how rollouts are drawn."""

    group_size: int = Field(default=8, ge=MIN_GROUP, le=MAX_GROUP)
    """L: completions a task."""

    max_new_tokens: int = Field(default=32, ge=1, le=131072)
    """Longest completion, in tokens. A longer one is cut and counts as truncated."""

    temperature: float = Field(default=1.0, ge=1e-3, le=100)
    """Temperature of the softmax."""

    top_p: float = Field(default=1.0, ge=1e-3, le=1)
    """Nucleus sampling: the share of the probability that may be drawn; 1 is all of it."""


class EngineSettings(Section):
    """[engine]: the inference engine."""

    kind: Literal["auto", "vllm", "transformers"] = "auto"
    """Which engine samples. `auto` takes vLLM where it is installed and the model is large enough to gain by it, and
    otherwise transformers. `swarmnode doctor` says which it is and why."""

    max_sequences: int = Field(default=0, ge=0, le=4096)
    """Most completions sampled at once; 0 chooses by engine and machine. Lower it if generation runs out of memory."""

    weights: Literal["auto", "merged", "adapter"] = "auto"
    """How new weights reach vLLM. `adapter`: as an adapter of its own, `merged`: added into the model's weights. `auto`
    takes the first on a GPU and the second on a CPU, where adapters are slow."""

    memory_gb: float = Field(default=0.0, ge=0, le=4096)
    """GiB for vLLM's key-value cache; 0 chooses by what the rollouts need and what is free."""

    max_logprob_gap: float = Field(default=0.06, gt=0, le=100)
    """Nats. When the log-probs of engine and policy differ by more on average on tokens just sampled, the engine does
    not sample from the policy, and the round stops. In bfloat16 rounding alone makes 0.03 to 0.05."""

    patience: float = Field(default=300.0, ge=1, le=86400)
    """Seconds without any sign of progress after which the learner process, engine included, is taken for hung and is
    replaced."""

    args: dict[str, Any] = {}
    """Further arguments of vLLM's `LLM`, as they are: `tensor_parallel_size`, `quantization`, `dtype`, ..."""

    @field_validator("args")
    @classmethod
    def _sizes_are_numbers(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if name in value and not (type(value[name]) is int and value[name] >= 1):
                raise ValueError(f"{name} must be a whole number of GPUs, at least 1, not {value[name]!r}")
        return value


class TrainingSettings(Section):
    """[training]: the learning step (GRPO, arXiv 2402.03300, as in SAPO section 3)."""

    train: bool = True
    """Whether this node learns. One that does not samples, scores and shares with the policy as it is (the base model,
    or the newest checkpoint), and makes no updates and no evaluations."""

    lr: float = Field(default=1e-4, gt=0, le=1)
    """Learning rate of AdamW."""

    warmup_steps: int = Field(default=0, ge=0, le=10**9)
    """Optimiser steps over which the learning rate rises from 0 to `lr`. A round has `epochs` times `minibatches`."""

    decay_after: int = Field(default=25, ge=0, le=10**9)
    """Optimiser steps, those of the warm-up at least, after which the learning rate falls with the inverse square root
    of the step; 0: never."""

    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled weight decay of AdamW."""

    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of AdamW's running means of the gradient and of its square."""

    max_grad_norm: float = Field(default=1.0, gt=0, le=1e6)
    """The gradient is scaled down to this norm."""

    epochs: int = Field(default=1, ge=1, le=64)
    """Passes over a round's groups. More than one makes the clipping of the ratio matter."""

    minibatches: int = Field(default=1, ge=1, le=64)
    """Optimiser steps a pass."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far below 1 the probability ratio may count; see `clip_high`."""

    clip_high: float = Field(default=0.28, gt=0, le=100)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; the paper takes 0.2 and 0.28."""

    kl: float = Field(default=0.0, ge=0, le=100)
    """Weight of the KL divergence to the base model (the k3 estimator); the paper takes 0."""

    advantage: Literal["group", "mean"] = "group"
    """`group`: (reward - mean) / std inside each group (GRPO). `mean`: reward - mean (Dr. GRPO, arXiv 2503.20783)."""

    loss: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """How token losses are averaged. `dapo`: over all tokens. `grpo`: over the tokens of each completion, then over
    completions. `dr_grpo`: summed and divided by completions times `max_new_tokens`."""

    truncated: Literal["keep", "drop"] = "keep"
    """Completions cut at the token limit: `keep` trains the tokens they have and no EOS, `drop` leaves them out."""

    zero_variance: Literal["drop", "keep"] = "drop"
    """Groups whose rewards are all equal have no gradient but that of the KL term, if `kl` is above 0. `drop` leaves
    them out altogether, that term included; `keep` lets their tokens count in the average and in that term."""

    overlap: bool = False
    """Sample the next round while this one is scored and shared; and while it is trained on, if the engine is vLLM and,
    on a CPU, `[node] threads` leaves cores to it. It costs memory for the rollouts of one more round, and completions
    come from a policy one learning step older than the one they train: the loss takes their ratio to the policy that
    sampled them, and what a crash or a stop interrupts is not sampled again alike."""

    gate: bool = True
    """The likelihood gate: rewarded completions of other nodes that this policy would hardly ever say, by what it says
    itself, are not trained on. It keeps out right answers with junk around them that verifiers skip."""

    token_budget: int = Field(default=0, ge=0, le=2**24)
    """Tokens (padding included) in one forward and backward pass; 0 is 2304 on a CPU, where more are no faster, and
    8192 elsewhere. It bounds memory whatever the lengths; when memory runs out all the same it is halved, with a
    warning."""

    ranks: int = Field(default=1, ge=1, le=64)
    """Processes that share a learning step (data parallelism). On a machine with several GPUs each takes one of them;
    on a CPU more than one only helps where memory bandwidth is split, as with several sockets."""

    def tokens_at_once(self, device: str) -> int:
        """The token budget on this device."""
        return self.token_budget or (2304 if device == "cpu" else 8192)

    def rate(self, step: int) -> float:
        """Learning rate of optimiser step 1, 2, ...: a linear warm-up, `lr`, then a fall with 1 / sqrt(step).

        A node has no last round that a schedule could end in. Large steps find what pays, small ones get it right.
        """
        if step < self.warmup_steps:
            return self.lr * step / self.warmup_steps
        top = max(self.decay_after, self.warmup_steps)
        return self.lr * (min(1.0, math.sqrt(top / max(1, step))) if self.decay_after else 1.0)


class LearnerSettings(Section):
    """Everything the learner process needs to know: it is sent to it once, when it starts."""

    model: ModelSettings = ModelSettings()
    lora: LoraSettings = LoraSettings()
    prompt: PromptSettings = PromptSettings()
    sampling: SamplingSettings = SamplingSettings()
    engine: EngineSettings = EngineSettings()
    training: TrainingSettings = TrainingSettings()
    seed: int = 0
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads for torch; 0 leaves the choice to torch, within what a container may use."""
