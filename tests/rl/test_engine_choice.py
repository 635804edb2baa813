"""Which engine is taken, and how vLLM is set up for a machine."""

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl.engines import adapters
from rl.engines.adapters import HandOver, check_adapter
from rl.engines.choice import VLLM_BYTES, choose
from rl.engines.sizing import GIB, Machine, Shape, Wishes, arguments, cache_bytes, utilisation
from rl.errors import EngineError
from rl.settings import EngineSettings

SMALL = Shape(
    layers=30, hidden=576, kv_heads=3, head_dim=64, vocabulary=49152, context=8192, weights=269 * 10**6, width=2
)
WISHES = Wishes(
    max_sequences=0, memory_gb=0, new_tokens=32, token_budget=8192, rank=16, adapter=False, dtype="bfloat16"
)
CPU = Machine("cpu", free=16 * GIB, total=23 * GIB)
GPU = Machine("cuda", free=20 * GIB, total=24 * GIB, capability=8.6)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("vllm", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def weights(directory: Path, size: int) -> Path:
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(size)
    return directory


@pytest.mark.usefixtures("installed")
def test_auto_takes_vllm_for_all_but_small_models(tmp_path: Path) -> None:
    assert choose(EngineSettings(), weights(tmp_path, VLLM_BYTES), "cpu").kind == "vllm"
    small = choose(EngineSettings(), weights(tmp_path, VLLM_BYTES - 1), "cpu")
    assert small.kind == "transformers"
    assert "small" in small.why
    assert choose(EngineSettings(), weights(tmp_path, VLLM_BYTES), "mps").kind == "transformers"
    assert choose(EngineSettings(kind="vllm"), weights(tmp_path, 1), "cpu").kind == "vllm"
    assert choose(EngineSettings(kind="transformers"), weights(tmp_path, VLLM_BYTES), "cpu").kind == "transformers"


@pytest.mark.usefixtures("missing")
def test_without_vllm_it_is_missed_only_if_asked_for(tmp_path: Path) -> None:
    assert "not installed" in choose(EngineSettings(), weights(tmp_path, VLLM_BYTES), "cpu").why
    with pytest.raises(EngineError, match="make install"):
        choose(EngineSettings(kind="vllm"), tmp_path, "cpu")


def test_choosing_loads_neither_torch_nor_vllm() -> None:
    program = "import sys, rl.engines.choice; sys.exit(any(m in sys.modules for m in ('torch', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=Path(__file__).parents[2]).returncode == 0


def test_the_cache_holds_the_rollouts_asked_for() -> None:
    chosen = arguments(SMALL, CPU, WISHES, {})
    assert chosen["max_num_seqs"] == 128
    assert chosen["max_model_len"] == SMALL.context
    assert chosen["kv_cache_memory_bytes"] == cache_bytes(SMALL, 128, WISHES) > 128 * 32 * SMALL.token_bytes
    assert chosen["block_size"] == 32
    assert chosen["enforce_eager"] is True
    assert "enable_lora" not in chosen


@pytest.mark.parametrize("machine", [CPU, GPU])
@pytest.mark.parametrize("gib", [0.5, 1, 2, 4, 8])
def test_a_small_machine_is_not_asked_for_more_than_it_has(machine: Machine, gib: float) -> None:
    tight = Machine(machine.device, int(gib * GIB), machine.total, machine.capability)
    chosen = arguments(SMALL, tight, WISHES, {})
    assert chosen["kv_cache_memory_bytes"] <= max(tight.free // 2, 2**24)
    # vLLM does not start unless a whole sequence fits.
    assert chosen["kv_cache_memory_bytes"] >= chosen["max_model_len"] * SMALL.token_bytes


def test_settings_win_over_the_machine() -> None:
    wishes = Wishes(7, 3.0, 32, 8192, 12, True, "bfloat16")
    chosen = arguments(SMALL, CPU, wishes, {"block_size": 64, "quantization": "fp8"})
    assert chosen["max_num_seqs"] == 7
    assert chosen["kv_cache_memory_bytes"] == 3 * GIB
    assert (chosen["block_size"], chosen["quantization"]) == (64, "fp8")
    assert (chosen["enable_lora"], chosen["max_loras"], chosen["max_lora_rank"]) == (True, 1, 16)


def test_a_cache_of_a_given_size_bounds_the_context() -> None:
    large = replace(SMALL, context=32768)
    chosen = arguments(large, CPU, replace(WISHES, memory_gb=0.25), {})
    assert chosen["kv_cache_memory_bytes"] == GIB // 4
    assert 1024 < chosen["max_model_len"] < 32768
    assert chosen["max_model_len"] * large.token_bytes <= GIB // 4


def test_a_gpu_starts_within_what_is_free() -> None:
    assert utilisation(GPU) * GPU.total <= GPU.free
    assert utilisation(Machine("cuda", 23 * GIB, 24 * GIB, 9.0)) == 0.9
    chosen: dict[str, Any] = arguments(SMALL, GPU, WISHES, {})
    assert chosen["max_num_seqs"] == 256
    assert "enforce_eager" not in chosen
    assert chosen["dtype"] == "bfloat16"
    assert arguments(SMALL, Machine("cuda", GPU.free, GPU.total, 7.5), WISHES, {})["dtype"] == "float16"


def test_no_directory_is_used_twice_and_none_is_left(tmp_path: Path) -> None:
    hand_over = HandOver(tmp_path)
    numbers, paths = zip(*(hand_over.fresh() for _ in range(5)), strict=True)
    assert len(set(numbers)) == len(set(paths)) == 5
    assert [path.exists() for path in paths] == [False] * 4 + [True]
    [root] = tmp_path.iterdir()
    assert root.stat().st_mode & 0o077 == 0
    hand_over.close()
    assert not list(tmp_path.iterdir())


def test_what_is_written_while_the_place_is_removed_stays_nowhere(tmp_path: Path) -> None:
    hand_over = HandOver(tmp_path)
    _, directory = hand_over.fresh()
    with (directory / "weights").open("wb") as begun:
        hand_over.close()
        begun.write(b"the rest")
    with pytest.raises(FileNotFoundError):
        (directory / "more").write_bytes(b"")
    with pytest.raises(FileNotFoundError):
        hand_over.fresh()
    hand_over.close()
    assert not list(tmp_path.iterdir())


def test_what_a_dead_process_left_is_removed_and_the_rest_stays(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f"{adapters.PREFIX}{dead.pid}-x", f"{adapters.PREFIX}{os.getpid()}-x", "other"):
        (tmp_path / name).mkdir()
    adapters.remove_stale(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{adapters.PREFIX}{os.getpid()}-x", "other"}


def test_an_adapter_without_its_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="missing"):
        check_adapter(tmp_path)
