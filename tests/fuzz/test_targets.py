"""Every target of `make fuzz`, on its seeds and on a few things like them."""

import logging
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import few
from tests.fuzz.loading import Target, load, names
from tests.fuzz.mutating import mutated

TARGETS: dict[str, tuple[Target, list[bytes]]] = {}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What is logged of such input may be text that the test's own report cannot hold."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", names())
@few(6)
@given(choice=st.integers(0, 2**32), random=st.randoms(use_true_random=False))
def test_nothing_but_its_error_escapes(name: str, choice: int, random: Random) -> None:
    if name not in TARGETS:
        target = load(name)
        TARGETS[name] = target, target.seeds()
        for seed in target.seeds():
            target.run(seed)
    target, seeds = TARGETS[name]
    target.run(mutated(seeds[choice % len(seeds)], random))
