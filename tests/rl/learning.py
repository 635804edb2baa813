"""What the tests of the learner share."""

from collections.abc import Callable
from typing import Any

import torch

from rl.advantage import advantages
from rl.batches import Group, Row
from rl.learner import Learner
from rl.rollouts import Completion, RolloutGroup, ScoredGroup

MakeLearner = Callable[..., Learner]
"""Makes a learner on the small model of the fixtures; sections of its settings are keyword arguments."""

UNCLIPPED = {"lr": 1e-2, "max_grad_norm": 1e6}
"""Settings of training under which a gradient is used as it is."""


def scored(group: RolloutGroup, rewards: list[float], origin: str = "me") -> ScoredGroup:
    return ScoredGroup(group, origin, 1, tuple(rewards), advantages(rewards))


def as_text(group: RolloutGroup) -> RolloutGroup:
    """What is left of a group when it comes from another node."""
    return RolloutGroup(group.task, tuple(Completion(c.text, c.finished) for c in group.completions), 0)


def state_of(learner: Learner) -> dict[str, torch.Tensor]:
    """Everything that an update may change, to compare bit by bit."""
    state = {f"weight {n}": v.detach().clone() for n, v in learner.policy.model.named_parameters()}
    state |= {f"master {i}": m.detach().clone() for i, m in enumerate(learner.policy.weights.masters)}
    for number, values in learner.policy.optimizer.state_dict()["state"].items():
        state |= {f"optimiser {number} {key}": value.clone() for key, value in values.items()}
    return state


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def make_groups(seed: int = 0) -> list[Group]:
    """Groups of several prompt and completion lengths, one of them without any advantage."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 250, (count,), generator=generator).tolist())

    lengths = [[5, 1, 9, 3], [7, 7], [2, 2, 2], [12, 1, 4]]
    return [
        Group(ids(4 + 9 * i), tuple(Row(ids(n), 0.0 if i == 2 else (-1.0) ** j * (1 + j)) for j, n in enumerate(ns)))
        for i, ns in enumerate(lengths)
    ]


def gradients(learner: Learner, groups: list[Group]) -> dict[str, torch.Tensor]:
    """The gradient that the optimiser step of one update uses, before clipping changes anything."""
    kept: dict[str, torch.Tensor] = {}

    def keep(optimizer: Any, args: Any, kwargs: Any) -> None:
        for name, master in zip(learner.policy.weights.names, learner.policy.weights.masters, strict=True):
            kept[name] = torch.zeros_like(master) if master.grad is None else master.grad.clone()

    handle = learner.policy.optimizer.register_step_pre_hook(keep)
    learner.policy.update(groups, 0)
    handle.remove()
    return kept


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], relative: float) -> None:
    largest = max(float(value.abs().max()) for value in one.values())
    assert largest > 0
    for name, value in one.items():
        assert float((value - other[name]).abs().max()) <= relative * largest, name


def warm(learner: Learner) -> Learner:
    """Give the adapter values, so that both of its matrices have gradients."""
    with torch.no_grad():
        for number, master in enumerate(learner.policy.weights.masters):
            torch.nn.init.normal_(master, std=0.2, generator=torch.Generator().manual_seed(number))
    learner.policy.weights.publish()
    return learner
