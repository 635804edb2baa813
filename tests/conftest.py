"""What holds for all tests."""

import gc
import importlib.util
import os

import pytest

# Collecting imports torch, libp2p and all that goes with them, of which nothing is garbage.
gc.disable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: one more than there are processors, since tests of processes and networks also wait."""
    return min(4, (os.cpu_count() or 1) + 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what needs vLLM where it is not installed. What takes longest begins first, to end together."""
    if importlib.util.find_spec("vllm") is None:
        missing = pytest.mark.skip(reason="vLLM is not installed: `ENGINE=vllm make install` adds it")
        for item in items:
            if item.get_closest_marker("vllm") is not None:
                item.add_marker(missing)
    items.sort(key=_place)


def pytest_collection_finish() -> None:
    """From here on there may be garbage."""
    gc.freeze()
    gc.enable()


def _place(item: pytest.Item) -> int:
    if item.get_closest_marker("slow") is None:
        return 3
    whole_nodes = "e2e" in item.path.parts
    return 0 if whole_nodes else 1 if item.get_closest_marker("xdist_group") is not None else 2
