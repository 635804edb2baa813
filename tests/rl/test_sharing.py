"""What a node shares of a round is its own choice."""

from random import Random

import pytest

from rl.rollouts import Completion, RolloutGroup, ScoredGroup
from rl.sharing import shared
from verifiers.base import Task, TaskRef


def group(number: int, informative: bool) -> ScoredGroup:
    task = Task(TaskRef("v", "1", "{}", 1, number), "sum", f"{number} + 1?", None)
    rewards = (1.0, 0.0 if informative else 1.0)
    return ScoredGroup(RolloutGroup(task, (Completion("1", True),) * 2, 0), "me", 1, rewards, rewards)


GROUPS = [group(number, number % 2 == 0) for number in range(8)]


def test_all_none_or_the_informative_ones() -> None:
    assert shared(GROUPS, "all", Random(1)) == GROUPS
    assert shared(GROUPS, "none", Random(1)) == []
    assert shared(GROUPS, "informative", Random(1)) == GROUPS[::2]
    assert shared([], 0.5, Random(1)) == []


def test_a_share_is_drawn_from_the_seed_and_keeps_its_order() -> None:
    chosen = shared(GROUPS, 0.5, Random(1))
    assert chosen == shared(GROUPS, 0.5, Random(1))
    assert len(chosen) == 4
    assert chosen == [one for one in GROUPS if one in chosen]
    assert {tuple(map(id, shared(GROUPS, 0.5, Random(seed)))) for seed in range(50)} != {tuple(map(id, chosen))}
    assert shared(GROUPS, 1.0, Random(1)) == GROUPS
    assert shared(GROUPS, 0.0, Random(1)) == []


def test_a_share_that_is_not_whole_is_kept_on_average() -> None:
    counts = [len(shared(GROUPS[:4], 0.1, Random(seed))) for seed in range(1000)]
    assert set(counts) == {0, 1}
    assert sum(counts) / len(counts) == pytest.approx(0.4, abs=0.06)
