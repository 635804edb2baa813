"""Saving, loading, exporting, and what is told about a learner."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.errors import CheckpointError, ModelError
from rl.learner import Learner
from rl.rollouts import Sampling
from tests.rl.learning import MakeLearner, same, scored, state_of
from verifiers.base import Task


def train(learner: Learner, tasks: list[Task], rounds: range) -> None:
    for number in rounds:
        groups = learner.generate(tasks, Sampling(4, 8), number)
        learner.update([scored(g, [1, 0, 0, 1]) for g in groups], number)


@pytest.mark.parametrize("rank", [4, 0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restart_continues_bit_by_bit(
    make_learner: MakeLearner, tasks: list[Task], tmp_path: Path, rank: int, dtype: str
) -> None:
    def make() -> Learner:
        return make_learner(lora={"rank": rank}, model={"dtype": dtype}, training={"epochs": 2, "warmup_steps": 9})

    straight = make()
    train(straight, tasks, range(3))
    straight.save(tmp_path)
    train(straight, tasks, range(3, 6))
    again = make()
    again.load(tmp_path)
    assert again.policy.step == 6
    train(again, tasks, range(3, 6))
    assert same(state_of(again), state_of(straight))
    assert again.generate(tasks, Sampling(4, 8), 9) == straight.generate(tasks, Sampling(4, 8), 9)


def test_a_new_policy_is_the_same_on_every_start_of_a_seed(make_learner: MakeLearner) -> None:
    assert same(state_of(make_learner()), state_of(make_learner()))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(40)[None]).logits
    return result


def test_peft_loads_the_saved_adapter(
    make_learner: MakeLearner, tasks: list[Task], tmp_path: Path, model_dir: Path
) -> None:
    learner = make_learner()
    train(learner, tasks, range(3))
    learner.save(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    plain = logits(base)
    loaded = logits(PeftModel.from_pretrained(base, str(tmp_path)))
    assert torch.allclose(loaded, logits(learner.policy.model), atol=1e-5)
    assert not torch.allclose(loaded, plain, atol=1e-2)


@pytest.mark.parametrize("rank", [4, 0])
def test_a_merged_export_loads_in_plain_transformers(
    make_learner: MakeLearner, tasks: list[Task], tmp_path: Path, rank: int
) -> None:
    learner = make_learner(lora={"rank": rank})
    train(learner, tasks, range(3))
    before = state_of(learner)
    learner.export(tmp_path, merged=True)
    assert same(state_of(learner), before)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(logits(loaded), logits(learner.policy.model), atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template == learner.tokenizer.chat_template


def test_an_adapter_export_loads_in_peft(
    make_learner: MakeLearner, tasks: list[Task], tmp_path: Path, model_dir: Path
) -> None:
    learner = make_learner()
    train(learner, tasks, range(2))
    learner.export(tmp_path, merged=False)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), str(tmp_path))
    assert torch.allclose(logits(loaded), logits(learner.policy.model), atol=1e-5)
    with pytest.raises(ModelError, match="merged"):
        make_learner(lora={"rank": 0}).export(tmp_path, merged=False)


@pytest.mark.parametrize("change", [{"lora": {"rank": 8}}, {"lora": {"alpha": 8.0}}, {"lora": {"rank": 0}}])
def test_another_adapters_checkpoint_is_refused(
    make_learner: MakeLearner, tmp_path: Path, change: dict[str, dict[str, Any]]
) -> None:
    make_learner().save(tmp_path)
    other = make_learner(**change)
    before = state_of(other)
    with pytest.raises(CheckpointError, match="lora"):
        other.load(tmp_path)
    assert same(state_of(other), before)


def test_another_models_checkpoint_is_refused(make_learner: MakeLearner, tmp_path: Path) -> None:
    learner = make_learner()
    learner.save(tmp_path)
    state = json.loads((tmp_path / "policy.json").read_text())
    (tmp_path / "policy.json").write_text(json.dumps({**state, "model": "someone/else"}))
    with pytest.raises(CheckpointError, match="someone/else"):
        learner.load(tmp_path)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.pt", "policy.json"])
def test_a_damaged_file_is_refused_and_changes_nothing(
    make_learner: MakeLearner, tasks: list[Task], tmp_path: Path, name: str
) -> None:
    learner = make_learner()
    train(learner, tasks, range(1))
    learner.save(tmp_path)
    train(learner, tasks, range(1, 2))
    before = state_of(learner)
    content = (tmp_path / name).read_bytes()
    for damaged in (content[: len(content) // 2], b""):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=name):
            learner.load(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        learner.load(tmp_path)
    assert same(state_of(learner), before)


def test_description(make_learner: MakeLearner, model_dir: Path) -> None:
    told = make_learner().describe()
    assert told["model"] == str(model_dir)
    assert told["parameters"] == sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model_dir).parameters())
    assert 0 < told["trained_parameters"] < told["parameters"]
    full = make_learner(lora={"rank": 0}).describe()
    assert full["trained_parameters"] == full["parameters"] == told["parameters"]
