import gc
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from verifiers.imports import importing, uncollected


@pytest.mark.parametrize("work", [importing, uncollected])
def test_the_collector_is_off_meanwhile_and_on_again_whatever_happens(
    work: Callable[[], AbstractContextManager[None]],
) -> None:
    def fail() -> None:
        with work():
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()


@pytest.mark.parametrize("work", [importing, uncollected])
def test_a_collector_that_was_off_stays_off(work: Callable[[], AbstractContextManager[None]]) -> None:
    gc.disable()
    try:
        with work(), work():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
