"""Every target of `make fuzz`, on its seeds and on a few things like them."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import few
from tests.fuzz.loading import Target, load, names
from tests.fuzz.mutating import mutated

@pytest.fixture(scope="module", params=names())
def target(request: pytest.FixtureRequest) -> Target:
    """Each in turn."""
    return load(request.param)


def test_what_is_written_in_earnest_is_read(target: Target) -> None:
    for seed in target.seeds():
        target.run(seed)


@few(15)
@given(choice=st.integers(0, 2**32), random=st.randoms(use_true_random=True))
def test_nothing_else_escapes(target: Target, choice: int, random: Random) -> None:
    seeds = target.seeds()
    target.run(mutated(seeds[choice % len(seeds)], random))
