"""What the learner needs of an inference engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl.rollouts import Sampling
from rl.work import Progress, Stop

Emit = Callable[[int], None]
"""Called with each token of a single completion as it is sampled."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Token ids of one completion (the stop token included if it `finished`), and the log-prob of each.

    Log-probs are in nats, of the model's plain distribution: at temperature 1, before any top-p cut.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool


class InferenceEngine(Protocol):
    """Samples completions from the current policy."""

    name: str
    context: int
    """Most tokens of a prompt and its completion together."""
    seconds_sync: float
    """Time that handing over new weights has taken so far."""
    apart: bool
    """Whether it has weights of its own, so that a thread may sample while another trains the policy."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seed: int,
        *,
        base: bool = False,
        stop: Stop,
        progress: Progress,
        emit: Emit | None = None,
    ) -> list[list[Sampled]]:
        """`sampling.samples` completions for each prompt (token ids), in order; the same for the same seed.

        `base` samples from the model before any training. `progress` gets completions done and wanted; `emit` is for a
        single completion. Raises Stopped, OutOfMemory, EngineError.
        """
        ...

    def refresh(self) -> None:
        """The policy's weights have changed: sample from the new ones from now on, without reloading the model."""
        ...

    def hand_over(self) -> None:
        """Do it now what `refresh` announced, and not at the next sampling. Raises OutOfMemory, EngineError."""
        ...

    def about(self) -> dict[str, Any]:
        """What runs, in plain values for a person."""
        ...

    def close(self) -> None:
        """Give back what the engine holds."""
        ...
