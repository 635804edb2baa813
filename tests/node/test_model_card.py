"""What an exported policy says of itself."""

import time
from pathlib import Path

import pytest

from node.config_sources import load, parse_flag
from node.datadir import DataDir
from node.evaluation import Accuracy, Evaluation, KindScore, ModelScore
from node.model_card import model_card, without_paths
from node.record import MetricsFile
from rl.model_names import PACKAGED_SMOLLM2, SMOLLM2
from tests.node.records import record


def test_the_card_names_no_path_of_this_machine(tmp_path: Path) -> None:
    mix = (
        '[{"verifier": "exact", "config": {"path": "/home/me/my data/questions.jsonl"}},'
        ' {"verifier": "command", "config": {"name": "judge", "files": ["~/a/b.txt"], "root": {"x": "in /srv/me/x"}}}]'
    )
    config = load([parse_flag(f"node.data_dir={tmp_path / 'node'}"), parse_flag(f"tasks.mix={mix}")], environ={}).config
    accuracy = Accuracy(mean=0.5, error=None)
    score = ModelScore(greedy=accuracy, sampled=accuracy)
    kinds = [
        KindScore(kind="judge(root=/srv/me/x, level=2)", tasks=1, base=score, policy=score),
        KindScore(kind="few", tasks=0, base=None, policy=None),
    ]
    overall = KindScore(kind="all", tasks=1, base=score, policy=score)
    evaluation = Evaluation(time=time.time(), model="/home/me/model", round=2, samples=1, kinds=kinds, overall=overall)
    with DataDir.open(tmp_path / "node") as data:
        MetricsFile(data.metrics_path).append(record(1))
        data.evaluation_path.write_text(evaluation.model_dump_json())
    card = model_card(config, "/home/me/model", "model", 1, merged=True)
    for local in ("/home", "/srv", "~", "my data", str(tmp_path)):
        assert local not in card
    for kept in ("`model`", "questions.jsonl", "b.txt", "in x", "judge(root=x, level=2)", "50.0", "| 1 to 1 |"):
        assert kept in card
    assert "base_model" not in card


@pytest.mark.parametrize("packaged", [True, False])
def test_the_card_of_an_adapter_says_how_to_load_it(tmp_path: Path, packaged: bool) -> None:
    config = load([parse_flag(f"node.data_dir={tmp_path}")], environ={}).config
    identity = PACKAGED_SMOLLM2 if packaged else SMOLLM2
    card = model_card(config, identity, SMOLLM2, 1, merged=False)
    assert f'base_model: "{SMOLLM2}"' in card
    assert "AutoPeftModelForCausalLM.from_pretrained" in card
    assert ("Q4_1" in card) == packaged
    local = model_card(config, "tiny", "tiny", 1, merged=False)
    assert "base_model" not in local
    assert "PeftModel.from_pretrained(base" in local


@pytest.mark.parametrize(
    "text", ["Qwen/Qwen2.5-0.5B-Instruct", "1 / 2", "/", "a/b/c", "https://example.org/a/b", "yes/no, or /"]
)
def test_what_only_looks_like_a_path_stays(text: str) -> None:
    assert without_paths(text) == text
