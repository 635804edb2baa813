import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.advantage import advantages


def test_one_of_four() -> None:
    # mean 1/4, population variance 3/16
    deviation = math.sqrt(3) / 4
    assert advantages([1, 0, 0, 0]) == pytest.approx([0.75 / deviation] + [-0.25 / deviation] * 3, rel=1e-3)


def test_mean_only() -> None:
    assert advantages([1, 0, 0, 0], "mean") == (0.75, -0.25, -0.25, -0.25)


@given(st.floats(0, 1), st.integers(2, 64))
def test_equal_rewards_are_exactly_zero(reward: float, count: int) -> None:
    assert advantages([reward] * count) == (0.0,) * count


@given(st.lists(st.floats(0, 1), min_size=2, max_size=64))
def test_sum_to_zero_and_keep_order(rewards: list[float]) -> None:
    values = advantages(rewards)
    assert sum(values) == pytest.approx(0, abs=1e-6)
    by_reward = sorted(zip(rewards, values, strict=True))
    assert [v for _, v in by_reward] == sorted(values)


@pytest.mark.parametrize("rewards", [[], [1.0, math.nan], [math.inf, 0.0]])
def test_refused(rewards: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        advantages(rewards)
