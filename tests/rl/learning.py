"""What the tests of the learner share."""

from collections.abc import Callable

import torch

from rl.advantage import advantages
from rl.learner import Learner
from rl.rollouts import Completion, RolloutGroup, ScoredGroup

MakeLearner = Callable[..., Learner]
"""Makes a learner on the small model of the fixtures; sections of its settings are keyword arguments."""


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
