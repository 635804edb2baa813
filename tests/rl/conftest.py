"""A language model small enough to train in a test: two layers, random weights, a tokenizer of single bytes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rl.learner import Learner
from rl.settings import LearnerSettings
from tests.rl.learning import MakeLearner
from verifiers.base import Example, Task, TaskRef

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# More threads than one only get into each other's way on a model this small.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def wide_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with attention heads of a width that vLLM can compute."""
    return write_model(tmp_path_factory.mktemp("wide"), head_dim=32)


def write_model(directory: Path, **further: Any) -> Path:
    """Write model and tokenizer. `further` goes into the model's configuration."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # As in SmolLM2, padding and EOS are the same token.
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        # Larger than the tokenizer's 258, as padded output layers are.
        vocab_size=272,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **further,
    )
    make: Any = LlamaForCausalLM
    model: Any = make(config)
    # What models such as Qwen suggest, and what must not change what is sampled.
    model.generation_config.update(do_sample=True, top_k=3, repetition_penalty=1.5)
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def make_learner(model_dir: Path) -> MakeLearner:
    """A learner on the small model; sections of its settings as keyword arguments. It has no likelihood gate, which
    would let none of the few texts pass that tests make up, unless it is given one.
    """

    def make(**sections: dict[str, Any]) -> Learner:
        defaults: dict[str, Any] = {
            "model": {"name": str(model_dir), "device": "cpu", "dtype": "float32"},
            "lora": {"rank": 4},
            "sampling": {"max_new_tokens": 8},
            "training": {"lr": 1e-2, "gate": False},
        }
        merged = {name: {**defaults.get(name, {}), **sections.get(name, {})} for name in {*defaults, *sections}}
        return Learner(LearnerSettings.model_validate(merged))

    return make


@pytest.fixture
def tasks() -> list[Task]:
    """Four questions of different lengths."""
    return [
        Task(TaskRef("t", "1", "{}", 0, i), "sum", "1" * (1 + 7 * i) + " + 1?", None, Example("1 + 1?", "2"))
        for i in range(4)
    ]
