"""Every target of `make fuzz`, on its seeds and on a few things like them."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import few
from tests.fuzz.loading import Target, load, names
from tests.fuzz.mutating import mutated

TARGETS: dict[str, tuple[Target, list[bytes]]] = {}


@pytest.mark.parametrize("name", names())
@few(6)
@given(choice=st.integers(0, 2**32), random=st.randoms(use_true_random=True))
def test_nothing_but_its_error_escapes(name: str, choice: int, random: Random) -> None:
    if name not in TARGETS:
        target = load(name)
        TARGETS[name] = target, target.seeds()
        for seed in target.seeds():
            target.run(seed)
    target, seeds = TARGETS[name]
    target.run(mutated(seeds[choice % len(seeds)], random))
