"""What holds for all tests."""

import importlib.util
from collections.abc import Sequence

import pytest


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Leave out what needs vLLM where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        missing = pytest.mark.skip(reason="vLLM is not installed: `ENGINE=vllm make install` adds it")
        for item in items:
            if item.get_closest_marker("vllm") is not None:
                item.add_marker(missing)
