"""What a node shares of a round: the subset S^n of SAPO (arXiv 2509.08721, section 3), by the node's own choice."""

from collections.abc import Sequence
from random import Random
from typing import Literal

from rl.rollouts import ScoredGroup

Share = Literal["all", "informative", "none"] | float
"""Which of a round's groups: all, those whose rewards differ, none, or that share of them (from 0 to 1)."""


def shared(groups: Sequence[ScoredGroup], share: Share, random: Random) -> list[ScoredGroup]:
    """The groups to send, in their order.

    A share is kept on average: of a number of groups that is not whole, the rest is the chance of one more.
    """
    if share == "all":
        return list(groups)
    if share == "none":
        return []
    if share == "informative":
        return [group for group in groups if group.informative]
    whole, rest = divmod(share * len(groups), 1)
    count = int(whole) + (random.random() < rest)
    return [groups[place] for place in sorted(random.sample(range(len(groups)), count))]
