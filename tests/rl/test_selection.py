"""The paper's rule: uniform, none twice, and no origin more than its share."""

from collections import Counter
from random import Random

import pytest

from rl.selection import Candidate, Uniform


def candidates(**counts: int) -> list[Candidate]:
    """So many of each origin."""
    origins = [origin for origin, count in counts.items() for _ in range(count)]
    return [Candidate(number, origin, 1, "sum", 8, 0.5, 0) for number, origin in enumerate(origins)]


def test_every_candidate_is_chosen_as_often() -> None:
    among = candidates(a=3, b=3, c=3)
    chosen = Counter(one.id for seed in range(3000) for one in Uniform().choose(among, 3, 3, Random(seed)))
    assert sum(chosen.values()) == 9000
    assert [chosen[number] for number in range(9)] == pytest.approx([1000] * 9, rel=0.12)


def test_none_twice_none_beyond_its_origins_share_and_the_same_from_the_same_seed() -> None:
    among = candidates(flood=500, a=1, b=3)
    for seed in range(20):
        chosen = Uniform().choose(among, 4, 2, Random(seed))
        assert len({one.id for one in chosen}) == 4
        assert max(Counter(one.origin for one in chosen).values()) <= 2
        assert chosen == Uniform().choose(among, 4, 2, Random(seed))


def test_fewer_than_asked_for_is_what_there_is() -> None:
    assert Uniform().choose([], 4, 2, Random(1)) == []
    assert len(Uniform().choose(candidates(a=9), 4, 2, Random(1))) == 2
    assert Uniform().choose(candidates(a=9), 0, 2, Random(1)) == []
