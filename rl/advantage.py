"""Advantages inside a group of completions. Pure Python: the node process computes them."""

import math
from collections.abc import Sequence
from typing import Literal

EPSILON = 1e-4
"""Added to the standard deviation. Small against that of any group with two different rewards of 0 and 1 (0.12 at 64
completions), so that it changes nothing there and only bounds groups of almost equal graded rewards."""


def advantages(rewards: Sequence[float], kind: Literal["group", "mean"] = "group") -> tuple[float, ...]:
    """How much better each completion was than its group, in the order of `rewards`.

    `group`: (reward - mean) / (std + EPSILON) with the population standard deviation (GRPO, arXiv 2402.03300, and
    SAPO, arXiv 2509.08721, section 3). `mean`: reward - mean (Dr. GRPO, arXiv 2503.20783). All rewards equal gives
    exact zeros. Raises ValueError for rewards that are not finite, or none at all.
    """
    if not rewards or not all(map(math.isfinite, rewards)):
        raise ValueError(f"advantages need finite rewards, got {list(rewards)}")
    if max(rewards) == min(rewards):
        return (0.0,) * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if kind == "mean":
        return tuple(centred)
    deviation = math.sqrt(math.fsum(value * value for value in centred) / len(rewards))
    return tuple(value / (deviation + EPSILON) for value in centred)
