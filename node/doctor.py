"""`swarmnode doctor`: can this machine run a node, and what to do where it cannot."""

import importlib.metadata
import importlib.util
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from packaging.requirements import Requirement

from node.config import Config
from node.datadir import DataDir
from node.doctor_engine import check_engine
from node.doctor_network import Check, check_network
from node.doctor_sandbox import check_sandbox
from node.errors import NodeError, file_problem
from node.identity import Identity
from node.sinks import install_advice
from node.text import clean
from rl import machine
from rl.errors import LearnerError
from rl.pool import PoolError, SqlitePool

_MIN_MEMORY_GB = 3.0
"""The learner with SmolLM2-135M and a sandbox worker; below that a node swaps or is killed."""


def examine(config: Config, as_json: bool) -> int:
    """Run all checks and print each when it is done. Returns the exit status: 1 if one failed."""
    checks: list[Check] = []
    learning = (_relay,) if config.node.relay else (_model, check_sandbox)
    for group in (_python, _packages, _clash, _sinks, _hardware, _data_dir, *learning, check_network):
        for check in group(config):
            checks.append(check)
            if not as_json:
                print(f"{check.state:<5} {check.name:<12} {clean(check.text)}", flush=True)
    if as_json:
        print(json.dumps([asdict(check) for check in checks], indent=2, ensure_ascii=False))
    failed = sum(check.state == "fail" for check in checks)
    if not as_json:
        print(f"\n{failed} to put right before a node can run" if failed else "\na node can run here")
    return 1 if failed else 0


def _python(config: Config) -> Iterator[Check]:
    recent = sys.version_info >= (3, 11)
    text = f"{platform.python_version()} in {sys.prefix}"
    yield Check("python", "ok" if recent else "fail", text if recent else f"{text}: 3.11 or newer is needed")


def _packages(config: Config) -> Iterator[Check]:
    wanted = [Requirement(text) for text in importlib.metadata.requires("swarmnode") or ()]
    needed = [requirement for requirement in wanted if requirement.marker is None]
    wrong = 0
    for requirement in needed:
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            installed = ""
        # 2.13.0+cpu satisfies ==2.13.0; a pre-release may satisfy a range.
        if not installed or not requirement.specifier.contains(installed, prereleases=True):
            wrong += 1
            found = f"{installed} is installed" if installed else "is not installed"
            yield Check("packages", "fail", f"{requirement.name} {found}: run `pip install '{requirement}'`")
    if not wrong:
        yield Check("packages", "ok", f"all {len(needed)} as pinned; torch {importlib.metadata.version('torch')}")


def _clash(config: Config) -> Iterator[Check]:
    try:
        other = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        yield Check("verifiers", "ok", "no other package of this name")
        return
    yield Check(
        "verifiers",
        "fail",
        f"PyPI's verifiers {other} has the same import name: run `pip uninstall verifiers`, and keep it in another"
        ' environment (verifier = "command" can use it there)',
    )


def _sinks(config: Config) -> Iterator[Check]:
    for name in ("tensorboard", "trackio", "wandb"):
        if getattr(config.sinks, name):
            there = importlib.util.find_spec(name) is not None
            advice = f"is on and not installed: {install_advice(name)}, or turn it off in [sinks]"
            yield Check("sinks", "ok" if there else "fail", f"{name} {'is installed' if there else advice}")


def _hardware(config: Config) -> Iterator[Check]:
    memory, cores = machine.memory().total / 2**30, machine.cpus()
    text = f"{cores} CPU cores, {memory:.1f} GiB of memory"
    if memory < _MIN_MEMORY_GB:
        yield Check("hardware", "note", f"{text}: little; use [model] name = 'tiny', or a machine with more")
    else:
        yield Check("hardware", "ok", text)
    import torch

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(number)
            yield Check("gpu", "ok", f"{about.name}, {about.total_memory / 2**30:.0f} GiB")
    elif torch.backends.mps.is_available():
        yield Check("gpu", "ok", "Apple GPU (mps)")
    elif shutil.which("nvidia-smi"):
        yield Check(
            "gpu", "note", "there is an NVIDIA driver, but this torch cannot use it: install torch's CUDA build"
        )
    else:
        yield Check(
            "gpu", "ok", "none: the policy trains on the CPU, which suits models of some hundred million weights"
        )


def _data_dir(config: Config) -> Iterator[Check]:
    path = config.node.data_dir
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        tempfile.TemporaryDirectory(dir=nearest, prefix=".swarmnode-doctor-").cleanup()
    except OSError as error:
        yield Check("data", "fail", f"{nearest} cannot be written ({error.strerror}): choose another with --data-dir")
        return
    yield _guarded("data", lambda: _holder(path))
    free = shutil.disk_usage(nearest).free // 2**20
    enough = free >= config.storage.min_free_mb
    advice = "" if enough else f": training pauses below {config.storage.min_free_mb}; make room"
    yield Check("disk", "ok" if enough else "fail", f"{free} MiB free{advice}")
    data = DataDir(path)
    if data.identity_path.exists():
        yield _guarded("identity", lambda: Check("identity", "ok", f"node {Identity.load(data.identity_path).node_id}"))
    if data.pool_path.exists():
        yield _guarded("pool", lambda: _pool(data.pool_path))


def _holder(path: Path) -> Check:
    pid = DataDir(path).running()
    if pid is not None:
        return Check(
            "data", "note", f"{path} is in use by the node with process id {pid}: stop it, or give another --data-dir"
        )
    return Check("data", "ok", f"{path} {'is writable and free' if path.exists() else 'can be made'}")


def _pool(path: Path) -> Check:
    groups = sum(kind.groups for kind in SqlitePool.success_in(path, 0, None))
    return Check("pool", "ok", f"{groups} groups of rollouts")


def _relay(config: Config) -> Iterator[Check]:
    yield Check("relay", "ok", "[node] relay is on: it loads no model and runs no verifier")


def _model(config: Config) -> Iterator[Check]:
    from rl.models import resolve

    try:
        resolved = resolve(config.model)
    except (LearnerError, OSError) as error:
        yield _problem("model", error)
        return
    dtype = str(resolved.dtype).removeprefix("torch.")
    yield Check("model", "ok", f"{resolved.identity} on {resolved.device} in {dtype}, from {resolved.location}")
    yield from check_engine(config.engine, resolved.location, resolved.device)


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except (NodeError, LearnerError, PoolError, OSError) as error:
        return _problem(name, error)


def _problem(name: str, error: Exception) -> Check:
    text = file_problem(error) if isinstance(error, OSError) else None
    return Check(name, "fail", text or str(error))
