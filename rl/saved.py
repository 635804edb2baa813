"""A policy, its optimiser and what its gate knows as files in a directory, which `node` keeps as a checkpoint."""

import io
import json
import math
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl.checkpoint import POLICY
from rl.errors import CheckpointError
from rl.optimizer import read_state, set_state
from rl.policy import Policy
from rl.settings import LoraSettings
from rl.work import is_out_of_memory, out_of_memory_as

FORMAT = 1
OPTIMIZER_FILE = "optimizer.pt"

_NO_STEP: dict[str, Any] = {"state": {}, "param_groups": []}
"""The state of an optimiser that has made no step."""

_MANY = 2**63


@dataclass(frozen=True, slots=True)
class Saved:
    """What a directory held: masters, the optimiser's state, its step count and what the gate knew, if anything.

    For a policy that does not train the optimiser's state is as it stood in its file.
    """

    weights: list[Tensor]
    optimizer: list[dict[str, Tensor]] | bytes
    step: int
    known: list[float]


def save_policy(policy: Policy, lora: LoraSettings, known: Sequence[float], directory: Path) -> None:
    """Write policy, optimiser and what the gate knows (`Gate.known`) into an existing directory: the adapter as peft
    reads it. Raises OSError.
    """
    policy.weights.save(directory)
    if policy.trains or not policy.kept_optimizer:
        # Through memory: torch reports a full disk as a RuntimeError, and a RuntimeError can be anything.
        optimizer = io.BytesIO()
        torch.save(policy.optimizer.state_dict() if policy.trains else _NO_STEP, optimizer)
        (directory / OPTIMIZER_FILE).write_bytes(optimizer.getbuffer())
    else:
        (directory / OPTIMIZER_FILE).write_bytes(policy.kept_optimizer)
    state = {
        "format": FORMAT,
        "model": policy.resolved.identity,
        "step": policy.step,
        "lora": lora.model_dump(),
        "gate": list(known),
    }
    (directory / POLICY).write_text(json.dumps(state, indent=1), "utf-8")


def read_policy(policy: Policy, lora: LoraSettings, directory: Path) -> Saved:
    """What `save_policy` wrote, if it fits. Raises CheckpointError or OutOfMemory. Changes nothing."""
    state = _read_state(directory / POLICY)
    mine = {"model": policy.resolved.identity, "lora": lora.model_dump()}
    for key, value in mine.items():
        if state[key] != value:
            raise CheckpointError(
                f"the checkpoint in {directory} was made with {key} {state[key]!r} and this node has {value!r}: "
                "restore that setting or start with an empty data directory"
            )
    with out_of_memory_as(f"the checkpoint in {directory} does not fit in memory: free some"):
        weights = policy.weights.read(directory)
        optimizer = _read_optimizer(policy, directory / OPTIMIZER_FILE)
        return Saved(weights, optimizer, int(state["step"]), state.get("gate", []))


def set_policy(policy: Policy, saved: Saved) -> None:
    """Make the policy what was saved."""
    policy.weights.restore(saved.weights)
    if isinstance(saved.optimizer, bytes):
        policy.kept_optimizer = saved.optimizer
    else:
        set_state(policy.optimizer, saved.optimizer)
    policy.step = saved.step


def _read_optimizer(policy: Policy, path: Path) -> list[dict[str, Tensor]] | bytes:
    try:
        if not policy.trains:
            return path.read_bytes()
        # A pickle may run any program; with `weights_only` torch refuses all but tensors and plain values.
        return read_state(policy.optimizer, torch.load(path, map_location="cpu", weights_only=True))
    except (pickle.UnpicklingError, struct.error) as error:
        raise CheckpointError(f"{path} holds something else than an optimiser's state") from error
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, AttributeError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(_is_finite(value) for value in values)


def _is_finite(value: Any) -> bool:
    # Any whole number is finite, and one of too many digits would not be taken by `isfinite`.
    return (type(value) is int and abs(value) < _MANY) or (type(value) is float and math.isfinite(value))


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if (
        not isinstance(state, dict)
        or state.get("format") != FORMAT
        or not {"model", "lora"} <= state.keys()
        or type(state.get("step")) is not int
        or not 0 <= state["step"] < _MANY
        # Missing in what was saved before there was a gate.
        or not _are_numbers(state.get("gate", []))
    ):
        raise CheckpointError(f"{path} is not of format {FORMAT}: another version of swarmnode wrote it")
    return state
