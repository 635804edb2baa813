"""The record of a run: `metrics.jsonl`, one JSON object a round. `docs/metrics.md` is its reference."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from node.rounds_file import RoundLine, RoundsFile

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(lambda value: round(value, 4))]


_LEAST = -sys.float_info.max
"""The least number that is one: a whole number can have more digits than any float."""


def _finite(value: float | None) -> float | None:
    """JSON has no NaN: what is not a number is not known."""
    return value if isinstance(value, (int, float)) and _LEAST <= value <= -_LEAST else None


Finite = Annotated[float, Field(allow_inf_nan=False)]
Measured = Annotated[float | None, BeforeValidator(_finite)]


class Record(RoundLine):
    """One finished round. The keys, their order and their meaning are stable; later versions may only add to them."""

    time: Finite
    """When the round was finished: seconds since 1970 (UTC)."""

    policy_step: Count
    """Optimiser steps the policy has taken since its base model."""

    local_groups: Count
    """Rollout groups this node sampled itself in this round."""

    external_groups: Count
    """Rollout groups of other nodes that were chosen for the update, whatever part of each is trained on."""

    reward_local: Finite
    """Mean reward of the node's own completions, from 0 to 1. Others' completions never count here."""

    reward_external: Measured
    """Mean reward, by this node's own verifiers, of the whole external groups; null if there were none."""

    informative_fraction: float = Field(ge=0, le=1)
    """Share of the local groups whose rewards differ; only those have a gradient."""

    tokens_generated: Count
    """Tokens sampled in this round, end-of-sequence tokens included."""

    seconds_generate: Seconds
    """Wall-clock time spent sampling, in seconds."""

    seconds_score: Seconds
    """Wall-clock time spent scoring, in seconds."""

    seconds_update: Seconds
    """Wall-clock time of the learning step, what it waited for the sampling of the next round included, in seconds."""

    tokens_trained: Count
    """Completion tokens that entered the loss, once however many epochs."""

    loss: Measured
    """Mean loss over the round's optimiser steps; null if there was none."""

    clip_fraction: Measured
    """Share of the trained tokens whose probability ratio was clipped; null if no step was taken."""

    entropy: Measured
    """Mean entropy of the policy at the trained positions, in nats a token; null if no step was taken."""

    grad_norm: Measured
    """Mean norm of the gradient before clipping; null if no step was taken."""

    engine_logprob_gap: Measured
    """Mean absolute difference between the log-probs of engine and policy, in nats, on some of the tokens
    sampled; null if it was not measured."""

    peers: Count
    """Other nodes connected when the round ended."""

    batches_sent: Count
    """Batches of rollouts sent to other nodes in this round."""

    batches_received: Count
    """Batches of rollouts that came from other nodes since the round before."""

    rejected: dict[str, Count]
    """What was refused since the round before: reason, and how often."""

    seconds_share: Seconds = 0.0
    """Wall-clock time spent keeping and sending own groups and choosing external ones, in seconds."""

    engine_restarts: Count = 0
    """How often the inference engine was started anew since the round before: rebuilt, or replaced together with its
    whole process."""

    seconds_sync: Seconds = 0.0
    """Wall-clock time of handing the engine new weights, in seconds; a part of `seconds_generate`."""

    gate_refused: Count = 0
    """Rewarded completions of other nodes that the likelihood gate kept out of the update."""

    gate_threshold: Measured = None
    """The least mean log-prob with which the gate lets a completion pass, in nats a token; null if it is off, or too
    little is known to set one."""

    learning_rate: Measured = None
    """Learning rate of the round's last optimiser step; null if there was none."""


class MetricsFile(RoundsFile[Record]):
    """`metrics.jsonl`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Record)


def tokens_per_second(records: Sequence[Record]) -> float:
    """Tokens sampled a second of sampling."""
    seconds = sum(record.seconds_generate for record in records)
    return sum(record.tokens_generated for record in records) / seconds if seconds > 0 else 0.0
