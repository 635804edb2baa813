"""What holds for all tests."""

import importlib.util
import os
from collections.abc import Generator
from pathlib import PurePosixPath
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

from verifiers.imports import importing

TOGETHER = (
    # Whole nodes, in two halves of about the same length: more than two of these tests at once are too much for a
    # small machine.
    ("test_silo", "test_swarm_hostile"),
    (
        "test_engine_death",
        "test_swarm_faults",
        "test_swarm_testnet",
        "test_api",
        "test_contribute",
        "test_dashboard",
        "test_orphans",
        "test_engine_tiny",
    ),
    # What takes long to set up once.
    ("test_vllm_engine",),
    ("test_commands",),
    ("test_ranks",),
)
"""Modules whose tests run one after the other in one process; these begin first."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: one more than there are processors, since tests of processes and networks also wait."""
    return min(4, (os.cpu_count() or 1) + 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting imports torch, libp2p and all that goes with them, of which nothing is garbage."""
    with importing():
        return (yield)


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out tests one by one, and those of `TOGETHER` as groups."""

    def _split_scope(self, nodeid: str) -> str:
        place = _place(nodeid)
        return nodeid if place == len(TOGETHER) else str(place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    """In place of all of xdist's own."""
    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what needs vLLM where it is not installed. What takes longest begins first, to end together."""
    if importlib.util.find_spec("vllm") is None:
        missing = pytest.mark.skip(reason="vLLM is not installed: `ENGINE=vllm make install` adds it")
        for item in items:
            if item.get_closest_marker("vllm") is not None:
                item.add_marker(missing)
    items.sort(key=lambda item: (_place(item.nodeid), item.get_closest_marker("slow") is None))


def _place(nodeid: str) -> int:
    """Which of `TOGETHER` a test belongs to; their number if to none."""
    module = PurePosixPath(nodeid.partition("::")[0]).stem
    return next((place for place, modules in enumerate(TOGETHER) if module in modules), len(TOGETHER))
