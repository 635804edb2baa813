"""The model that ships with the project: it loads everywhere, reads any text, and has something left to learn."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.make_tiny import Ability, Lessons, Plan, answers, build_model, measure, render
from bench.tiny_tasks import FORMS, TinyTask, load_tasks
from bench.tiny_vocab import build_tokenizer
from rl.prompts import encode_text
from verifiers.base import is_held_out

TINY = Path(__file__).parents[2] / "rl" / "tiny"
TEXTS = [
    "Calculate 4 - 1.",
    "Count forward 2 days from Tuesday, October 18, 2022 - what's the weekday? Answer using the complete weekday name.",
    "  two  spaces , a tab\tand\r\nlines\n\n",
    "naïve café, 你好, עברית, 🎉👩‍👩‍👧, é as two characters, \x00 and \x7f",
    "<0x41> <|eos|> <|sep|>",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(TINY)
    return loaded.eval()


@pytest.fixture(scope="module")
def tasks() -> list[TinyTask]:
    return load_tasks()


def test_it_is_small_and_says_how_it_was_made() -> None:
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 3_000_000
    assert "python -m bench.make_tiny" in (TINY / "README.md").read_text(encoding="utf-8")


def test_it_generates_with_no_sampling_defaults_of_its_own(model: Any, tokenizer: Any) -> None:
    defaults = model.generation_config.to_diff_dict()
    assert not defaults.keys() & {"do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens"}
    assert defaults["eos_token_id"] == tokenizer.eos_token_id
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    [[text]] = answers(model, tokenizer, ["Calculate 2 + 3."], samples=1)
    assert text


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    tokens = encode_text(tokenizer, text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_the_shipped_tokenizer_is_the_one_that_the_script_builds(tokenizer: Any) -> None:
    built = build_tokenizer()
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer.chat_template == built.chat_template


def test_prompts_of_its_tasks_are_short(tokenizer: Any, tasks: list[TinyTask]) -> None:
    for task in tasks:
        lengths = [len(render(tokenizer, question.prompt)) for question in task.questions(200, 5, held_out=False)]
        assert max(lengths) <= 32, task.kind


def test_the_prompt_is_the_last_message_alone(tokenizer: Any) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Calculate 4 - 1."}]
    alone = tokenizer.apply_chat_template(turns[1:], tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == alone


def test_exactly_one_form_of_an_answer_is_accepted(tasks: list[TinyTask]) -> None:
    for task in tasks:
        questions = task.questions(300, 11, held_out=False)
        assert len(set(task.forms)) == FORMS
        task.check_forms(questions)
        assert all(task.knows(question, task.forms[-1].format(question.answer)) for question in questions)


def test_a_form_that_the_scorer_accepts_is_refused() -> None:
    task = next(task for task in load_tasks() if task.kind == "chain_sum")
    task.forms = ("{}", "+{}")
    with pytest.raises(ValueError, match="chain_sum"):
        task.check_forms(task.questions(50, 11, held_out=False))


def test_no_held_out_prompt_is_ever_taught(tasks: list[TinyTask], tokenizer: Any) -> None:
    for task in tasks:
        assert not any(is_held_out(question.prompt) for question in task.questions(500, 3, held_out=False))
        assert all(is_held_out(question.prompt) for question in task.questions(500, 3, held_out=True))
    held = next(question for question in tasks[0].questions(500, 3, held_out=True))
    wanted = render(tokenizer, held.prompt)
    lessons = Lessons(tasks[:1], tokenizer, Plan(steps=20, batch=32))
    taught = [row[: len(wanted)] for ids, _ in lessons for row in ids.tolist()]
    assert len(taught) == 640
    assert wanted not in taught


def test_an_untrained_model_has_the_shipped_shape(model: Any, tokenizer: Any) -> None:
    fresh = build_model(tokenizer, seed=0)
    shapes = {name: weight.shape for name, weight in fresh.state_dict().items()}
    assert shapes == {name: weight.shape for name, weight in model.state_dict().items()}
    assert 150_000 <= sum(weight.numel() for weight in fresh.parameters()) <= 900_000


def _mean(abilities: list[Ability], name: str) -> float:
    return float(sum(getattr(ability, name) for ability in abilities) / len(abilities))


@pytest.mark.slow
def test_it_knows_far_more_than_it_shows(model: Any, tokenizer: Any, tasks: list[TinyTask]) -> None:
    torch.manual_seed(0)
    seen = [measure(model, tokenizer, task, held_out=False, questions=24, samples=16) for task in tasks]
    held = [measure(model, tokenizer, task, held_out=True, questions=24, samples=16) for task in tasks]
    assert 0.02 <= _mean(seen, "accepted") <= 0.09
    assert _mean(seen, "known") >= 6 * _mean(seen, "accepted")
    assert 0.005 <= _mean(held, "accepted") <= 0.09
    assert _mean(held, "known") >= 0.15
