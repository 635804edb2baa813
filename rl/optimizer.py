"""AdamW (arXiv 1711.05101) that holds all its memory from the start, so that a step allocates nothing.

Torch allocates its state at the first step, and the usual kernels another copy of the weights at each: memory would run
out between two weights, with some of them changed. The fused kernel works in place.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MEANS = ("exp_avg", "exp_avg_sq")


def make_adamw(masters: Sequence[Tensor], betas: tuple[float, float]) -> torch.optim.AdamW:
    """An optimiser of `masters` (float32) that has made no step. Learning rate and decay are set before each."""
    optimizer = torch.optim.AdamW(list(masters), lr=0.0, betas=betas, weight_decay=0.0, fused=True)
    for master in masters:
        state: dict[str, Tensor] = {name: torch.zeros_like(master, requires_grad=False) for name in MEANS}
        optimizer.state[master] = {"step": torch.zeros((), device=master.device), **state}
    return optimizer


def copy_state(optimizer: torch.optim.AdamW) -> list[dict[str, Tensor]]:
    """A copy of the running means and step counts, one entry a weight, for `set_state`."""
    return [{key: value.clone() for key, value in optimizer.state[master].items()} for master in _weights(optimizer)]


def read_state(optimizer: torch.optim.AdamW, saved: Any) -> list[dict[str, Tensor]]:
    """What `state_dict` gave, for `set_state`. Raises ValueError unless it is that of an optimiser like this one."""
    states = saved["state"] if isinstance(saved, dict) and isinstance(saved.get("state"), dict) else {}
    masters = _weights(optimizer)
    # An optimiser that has made no step may have saved no state.
    if not states and isinstance(saved, dict) and "param_groups" in saved:
        return [{key: torch.zeros_like(value) for key, value in optimizer.state[m].items()} for m in masters]
    if set(states) != set(range(len(masters))):
        raise ValueError(f"it holds the state of {len(states)} weights, not of {len(masters)}")
    for number, master in enumerate(masters):
        expected = {key: value.shape for key, value in optimizer.state[master].items()}
        found = states[number]
        if not isinstance(found, dict) or {k: getattr(v, "shape", None) for k, v in found.items()} != expected:
            raise ValueError(f"the state of weight {number} has other parts or shapes than this model's")
    return [states[number] for number in range(len(masters))]


@torch.no_grad()
def set_state(optimizer: torch.optim.AdamW, states: Sequence[dict[str, Tensor]]) -> None:
    """Take running means and step counts from what `copy_state` or `read_state` gave."""
    for master, values in zip(_weights(optimizer), states, strict=True):
        for key, value in optimizer.state[master].items():
            value.copy_(values[key])


@torch.no_grad()
def farthest(optimizer: torch.optim.AdamW, gradient: float) -> float:
    """A bound on every weight after a step along gradients of at most `gradient`; NaN if not all is finite now.

    It divides by AdamW's epsilon alone and so is far above where weights go, yet far below what float32 holds: enough
    to know before a step that it cannot overflow, without a copy of the weights to return to.
    """
    [setting] = optimizer.param_groups
    states = [optimizer.state[master] for master in _weights(optimizer)]
    mean, square = (_largest([state[name] for state in states]) for name in MEANS)
    weight = _largest(_weights(optimizer))
    if not math.isfinite(weight + mean + square):
        return math.nan
    direction = max(mean, gradient) / (1 - setting["betas"][0]) / setting["eps"]
    return float(weight + setting["lr"] * (setting["weight_decay"] * weight + direction))


def _largest(tensors: Sequence[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors, math.inf))


def _weights(optimizer: torch.optim.AdamW) -> list[Tensor]:
    return [weight for setting in optimizer.param_groups for weight in setting["params"]]
