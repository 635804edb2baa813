"""GGUF: what plain transformers reads of the file is the model that was written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rl.errors import ModelError
from rl.gguf_file import write_gguf
from rl.models import resolve
from rl.settings import ModelSettings
from tests.rl.conftest import write_model

TEXT = "It's 12 + 345 = 357, isn't it?\n  Yes<|im_end|>"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.tensor([list(range(3, 40))])).logits
    return result


def add_merge(path: Path) -> None:
    """Make one token of `is`, which the tokenizer of single bytes has not."""
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["is"] = 260
    tokenizer["model"]["merges"] = [["i", "s"]]
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_transformers_reads_the_same_model(tmp_path: Path, kind: str) -> None:
    whole = tmp_path / "whole"
    write_model(whole, **({"head_dim": 16} if kind == "llama" else {}))
    if kind == "qwen2":
        settings = json.loads((whole / "config.json").read_text()) | {"model_type": kind}
        make: Any = AutoModelForCausalLM.from_config
        model = make(AutoConfig.for_model(**settings))
        # Random biases and norms, which are 0 and 1 at first.
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.to(torch.bfloat16).save_pretrained(whole)
    add_merge(whole / "tokenizer.json")
    written = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    write_gguf(whole, tmp_path / "model.gguf", "made up")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    assert read.config.model_type == kind
    torch.testing.assert_close(logits(read), logits(written))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    known = AutoTokenizer.from_pretrained(whole)
    assert tokenizer(TEXT).input_ids == known(TEXT).input_ids
    assert 260 in tokenizer(TEXT).input_ids
    assert tokenizer.eos_token_id == known.eos_token_id
    assert tokenizer.chat_template == known.chat_template


def test_what_has_no_form_is_said(tmp_path: Path) -> None:
    tiny = resolve(ModelSettings(name="tiny")).location
    with pytest.raises(ModelError, match="the tokenizer of this model has no GGUF form"):
        write_gguf(tiny, tmp_path / "model.gguf", "tiny")
    for change, problem in (
        ({"model_type": "gpt2"}, "a gpt2 model has no GGUF form"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "of type linear"),
    ):
        settings = json.loads((tiny / "config.json").read_text()) | change
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ModelError, match=problem):
            write_gguf(tmp_path, tmp_path / "model.gguf", "changed")
