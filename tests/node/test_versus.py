"""Two policies side by side, and what is exported: other programs load it, and it is the policy that was measured."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from node.commands import exporting
from node.commands.evaluating import compare_policy
from node.config import Config
from node.config_sources import load, load_run, parse_flag
from node.datadir import DataDir
from node.errors import NodeError
from node.evaluations import EvaluationsFile
from node.policy import best, newest, open_policy
from node.versus import Opponent, standing
from rl.checkpoint import CheckpointStore
from rl.errors import CheckpointError, ModelError
from rl.learner import Learner
from rl.prompts import decode, render
from rl.rollouts import Sampling
from tests.node.records import evaluated
from tests.rl.conftest import write_model
from tests.rl.test_gguf_file import add_merge
from verifiers.base import Task, TaskRef

GCD = "Find the Greatest Common Divisor (GCD) of these numbers: {}, {}. Give only the GCD as your final answer."
TASKS = [Task(TaskRef("t", "1", "{}", 0, n), "sum", f"What is {n} + {n}?", None) for n in range(6)]


def config_in(path: Path) -> Config:
    # Questions that the model has a chance with, and whose verifier starts at once.
    pairs = [(a, b) for a in range(2, 30) for b in range(2, a)]
    lines = [json.dumps({"question": GCD.format(a, b), "answer": str(math.gcd(a, b))}) for a, b in pairs]
    (path / "gcd.jsonl").write_text("\n".join(lines))
    mix = json.dumps([{"verifier": "exact", "config": {"path": str(path / "gcd.jsonl")}}])
    flags = [f"node.data_dir={path}", f"tasks.mix={mix}", "model.name=tiny", "lora.rank=4", "evaluation.per_task=8"]
    return load([parse_flag(flag) for flag in flags], environ={}).config


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Of a node with checkpoints of rounds 1 and 2, of which the first was better."""
    config = config_in(tmp_path_factory.mktemp("node"))
    data = DataDir(config.node.data_dir)
    data.write_config(config)
    store, evaluations = CheckpointStore(data.checkpoints_path), EvaluationsFile(data.evaluations_path)
    learner = Learner(config.learner_settings(1))
    for number, sampled in ((1, 0.9), (2, 0.1)):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for master in learner.policy.weights.masters:
                master.add_(0.02 * torch.randn(master.shape, generator=generator))
        learner.policy.weights.publish()
        directory = store.begin(number)
        learner.save(directory)
        store.commit(number, directory, {"model": "tiny", "policy_step": number, "cursor": {}, "seed": 1})
        evaluations.append(evaluated(number, sampled, gcd=8))
    learner.close()
    return config


def greedy(learner: Learner) -> list[str]:
    groups = learner.generate(TASKS, Sampling(1, 12, temperature=0.0), 0)
    return [group.completions[0].text for group in groups]


def plain(directory: Path, prompts: list[list[int]], stops: list[int], **how: str) -> list[str]:
    """What transformers alone answers with a model that was exported."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(directory, **how)
    tokenizer = AutoTokenizer.from_pretrained(directory, **how)
    answers = []
    for prompt in prompts:
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=stops)
        answers.append(decode(tokenizer, whole[0, len(prompt) :].tolist()))
    return answers


def test_the_best_checkpoint_is_not_the_newest(config: Config) -> None:
    found = newest(config)
    assert found is not None
    assert (best(config).round, found.round) == (1, 2)
    with pytest.raises(NodeError, match="no policy has been measured yet"):
        best(config.model_copy(update={"node": config.node.model_copy(update={"data_dir": Path("/nowhere")})}))


def test_an_exported_model_answers_in_plain_transformers_as_the_policy_does(config: Config, tmp_path: Path) -> None:
    exporting.export_policy(config, tmp_path / "out", exporting.Wanted(best=True), None, False)
    with open_policy(config, best) as current:
        known = greedy(current.learner)
        prompts = [render(current.learner.tokenizer, config.prompt, task) for task in TASKS]
        stops = sorted(current.learner.policy.stop_tokens)
    with open_policy(config, newest) as other:
        assert greedy(other.learner) != known, "the checkpoints differ"
    assert plain(tmp_path / "out", prompts, stops) == known
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| 1 | 0.000 | 0.900 | 0.000 |" in card
    assert "| 2 |" not in card.partition("While training")[2], "was measured later"


def test_a_gguf_file_answers_in_plain_transformers_as_the_policy_does(tmp_path: Path) -> None:
    write_model(tmp_path / "base")
    add_merge(tmp_path / "base" / "tokenizer.json")
    flags = [f"node.data_dir={tmp_path / 'node'}", f"model.name={tmp_path / 'base'}", "engine.kind=transformers"]
    config = load([parse_flag(flag) for flag in flags], environ={}).config
    data = DataDir(config.node.data_dir)
    data.checkpoints_path.mkdir(parents=True)
    data.write_config(config)
    store = CheckpointStore(data.checkpoints_path)
    learner = Learner(config.learner_settings(1))
    untrained = greedy(learner)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in learner.policy.weights.masters:
            master.add_(0.1 * torch.randn(master.shape, generator=generator))
    learner.policy.weights.publish()
    known = greedy(learner)
    assert known != untrained
    directory = store.begin(1)
    learner.save(directory)
    store.commit(1, directory, {"model": learner.policy.resolved.identity, "policy_step": 1, "cursor": {}, "seed": 1})
    prompts = [render(learner.tokenizer, config.prompt, task) for task in TASKS]
    stops = sorted(learner.policy.stop_tokens)
    learner.close()
    exporting.export_policy(config, tmp_path / "out", exporting.Wanted(form="gguf"), None, False)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "model.gguf"]
    assert plain(tmp_path / "out", prompts, stops, gguf_file="model.gguf") == known


def test_a_model_that_gguf_has_no_form_for_leaves_nothing(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no GGUF form"):
        exporting.export_policy(config, tmp_path / "out", exporting.Wanted(form="gguf"), None, False)
    assert list(tmp_path.iterdir()) == []


def test_a_policy_is_held_against_a_model_a_checkpoint_and_another_node(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = DataDir(config.node.data_dir)
    loaded = load_run(data.config_path)
    exporting.export_policy(config, tmp_path / "out", exporting.Wanted(), None, False)
    capsys.readouterr()
    results = []
    for against in ("base", str(tmp_path / "out")):
        compare_policy(loaded, against, as_json=True)
        results.append(json.loads(capsys.readouterr().out))
    assert {result["policy"] for result in results} == {"tiny after round 2"}
    base, exported = (result["overall"] for result in results)
    assert base["tasks"] == 8
    assert {result["overall"]["policy"]["greedy"]["mean"] for result in results} == {base["policy"]["greedy"]["mean"]}
    # What was exported is the policy: they differ by rounding at most.
    assert exported["difference"]["greedy"]["mean"] == 0
    assert exported["difference"]["sampled"]["mean"] == pytest.approx(0, abs=0.1)
    compare_policy(loaded, str(data.path), as_json=False, of_best=True)
    out = capsys.readouterr().out
    assert "policy: tiny after round 1" in out
    assert f"other:  {data.path} (tiny after round 2)" in out


def test_a_checkpoint_of_a_peer_brings_its_model_and_its_adapter(config: Config, tmp_path: Path) -> None:
    shutil.copytree(DataDir(config.node.data_dir).checkpoints_path / "00000001", tmp_path / "theirs")
    other = config.model_copy(update={"lora": config.lora.model_copy(update={"rank": 8})})
    opponent = Opponent.at(tmp_path / "theirs", other)
    found = opponent.find(opponent.config)
    assert found is not None
    assert (found.round, opponent.config.lora.rank, opponent.config.model.name) == (1, 4, "tiny")
    # Cut on its way.
    (tmp_path / "theirs" / "optimizer.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt has 0 bytes"):
        Opponent.at(tmp_path / "theirs", other)


def test_what_cannot_be_compared_with_is_said(config: Config, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for path, problem in (
        (tmp_path / "adapter", "is an adapter alone"),
        (tmp_path, "holds nothing to compare with"),
        (tmp_path / "typo", "typo does not exist"),
    ):
        with pytest.raises(NodeError, match=problem):
            Opponent.at(path, config)


def test_a_checkpoint_that_a_node_prunes_meanwhile_is_told(config: Config, tmp_path: Path) -> None:
    copied = tmp_path / "checkpoint"
    shutil.copytree(newest(config).path, copied)  # type: ignore[union-attr]
    opponent = Opponent.at(copied, config)
    shutil.rmtree(copied)
    with pytest.raises(NodeError, match="has gone meanwhile"), open_policy(opponent.config, opponent.find):
        pass


def test_differences_are_paired() -> None:
    # Task by task the first is better by 0.1, however different the tasks are.
    rewards = [[0.1], [0.5], [0.9]]
    better = [[0.2], [0.6], [1.0]]
    found = standing("all", range(3), (better, better), (rewards, rewards))
    assert found.difference.greedy.mean == pytest.approx(0.1)
    assert found.difference.greedy.error == pytest.approx(0, abs=1e-9)
    assert found.policy.greedy.error is not None
    assert found.policy.greedy.error > 0.2
