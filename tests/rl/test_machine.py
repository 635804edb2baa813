"""What a process may use of its machine, in and outside of containers."""

import os
from pathlib import Path

import psutil
import pytest

from rl import machine

GIB = 2**30
GROUP_2 = "0::/pod/node\n"
GROUP_1 = "4:memory:/docker/5f\n1:cpu,cpuacct:/docker/5f\n0::/\n"


@pytest.fixture(autouse=True)
def a_large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 cores and 64 GiB, 48 of them free."""
    whole = psutil.virtual_memory()._replace(total=64 * GIB, available=48 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: whole)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def system(root: Path, group: str, files: dict[str, str]) -> Path:
    """A root directory with that /proc/self/cgroup and those files below /sys/fs/cgroup."""
    for name, text in {"proc/self/cgroup": group, **{f"sys/fs/cgroup/{name}": t for name, t in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_process_without_limits_has_the_whole_machine(tmp_path: Path) -> None:
    files = {"pod/node/memory.max": "max\n", "pod/node/memory.current": "5\n", "pod/node/cpu.max": "max 100000\n"}
    root = system(tmp_path, GROUP_2, files)
    assert machine.memory(root) == machine.Memory(64 * GIB, 48 * GIB)
    assert machine.cpus(root) == 16


def test_a_system_without_control_groups_has_the_whole_machine(tmp_path: Path) -> None:
    assert machine.memory(tmp_path) == machine.Memory(64 * GIB, 48 * GIB)
    assert machine.cpus(tmp_path) == 16


def test_the_limits_of_a_container_hold_less_what_can_be_given_back(tmp_path: Path) -> None:
    files = {
        # As docker shows it: the container's own group is the top.
        "memory.max": f"{4 * GIB}\n",
        "memory.current": f"{3 * GIB}\n",
        "memory.stat": f"anon {2 * GIB}\ninactive_file {GIB}\n",
        "cpu.max": "150000 100000\n",
    }
    root = system(tmp_path, "0::/\n", files)
    assert machine.memory(root) == machine.Memory(4 * GIB, 2 * GIB)
    assert machine.cpus(root) == 2


def test_the_tightest_of_nested_limits_counts(tmp_path: Path) -> None:
    files = {
        "pod/memory.max": f"{2 * GIB}\n",
        "pod/memory.current": f"{GIB}\n",
        "pod/memory.stat": "inactive_file 0\n",
        "pod/cpu.max": "50000 100000\n",
        "pod/node/memory.max": f"{8 * GIB}\n",
        "pod/node/memory.current": "0\n",
        "pod/node/memory.stat": "inactive_file 0\n",
        "pod/node/cpu.max": "400000 100000\n",
    }
    root = system(tmp_path, GROUP_2, files)
    assert machine.memory(root) == machine.Memory(2 * GIB, GIB)
    assert machine.cpus(root) == 1


def test_limits_of_version_1_hold_where_the_path_is_that_of_the_host(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "memory/memory.usage_in_bytes": f"{GIB}\n",
        "memory/memory.stat": f"total_inactive_file {GIB // 2}\n",
        "cpu/cpu.cfs_quota_us": "300000\n",
        "cpu/cpu.cfs_period_us": "100000\n",
    }
    root = system(tmp_path, GROUP_1, files)
    assert machine.memory(root) == machine.Memory(2 * GIB, 3 * GIB // 2)
    assert machine.cpus(root) == 3


def test_no_limit_of_version_1_is_the_whole_machine(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "5\n",
        "memory/memory.stat": "total_inactive_file 0\n",
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
    }
    root = system(tmp_path, GROUP_1, files)
    assert machine.memory(root) == machine.Memory(64 * GIB, 48 * GIB)
    assert machine.cpus(root) == 16
