"""Sampling, and that what it reports is what training computes."""

import math
from pathlib import Path

import pytest
import torch

from rl.batches import Group, Row
from rl.engines.transformers import TransformersEngine, _nucleus, _pick
from rl.errors import ModelError, OutOfMemory, PromptError, Stopped
from rl.rollouts import Sampling
from rl.work import never, no_progress
from tests.rl.learning import MakeLearner
from verifiers.base import Task, TaskRef

PROMPTS = [[1, 2, 3], list(range(40, 70)), [7]]


def run(engine: TransformersEngine, sampling: Sampling, seed: int = 0, base: bool = False) -> list[list[object]]:
    groups = engine.generate(PROMPTS, sampling, seed, base=base, stop=never, progress=no_progress)
    return [list(group) for group in groups]


def test_reported_logprobs_are_those_of_training(make_learner: MakeLearner) -> None:
    learner = make_learner()
    # An adapter that does something, so that agreement is not the base model's.
    for master in learner.policy.weights.masters:
        torch.nn.init.normal_(master, std=0.1)
    groups = learner.engine.generate(PROMPTS, Sampling(6, 12), 1, stop=never, progress=no_progress)
    rows = [[Row(s.tokens, 0.0, s.logprobs) for s in group] for group in groups]
    trained = learner.policy.logprobs([Group(tuple(p), tuple(r)) for p, r in zip(PROMPTS, rows, strict=True)])
    for row in (row for group in rows for row in group):
        assert row.sampled is not None
        assert trained[row].tolist() == pytest.approx(list(row.sampled), abs=2e-5)
    base = learner.policy.logprobs([Group(tuple(PROMPTS[0]), tuple(rows[0]))], base=True)
    assert any(not torch.allclose(base[row], trained[row], atol=0.01) for row in rows[0])


def test_finished_and_truncated_are_told_apart(make_learner: MakeLearner) -> None:
    learner = make_learner()
    completions = [
        c for g in learner.engine.generate(PROMPTS, Sampling(64, 40), 1, stop=never, progress=no_progress) for c in g
    ]
    eos = learner.tokenizer.eos_token_id
    assert {c.finished for c in completions} == {True, False}
    for completion in completions:
        assert completion.finished == (completion.tokens[-1] == eos)
        assert completion.finished or len(completion.tokens) == 40
        assert eos not in completion.tokens[:-1]
        assert max(completion.tokens) < len(learner.tokenizer)


def test_frequencies_are_those_of_the_plain_softmax(make_learner: MakeLearner) -> None:
    """Whatever top-k and repetition penalty the model's own generation_config suggests."""
    learner = make_learner()
    sampled = learner.engine.generate([PROMPTS[0]], Sampling(4096, 1), 3, stop=never, progress=no_progress)[0]
    seen = {s.tokens[0]: s.logprobs[0] for s in sampled}
    assert len(seen) > 10
    likely = [token for token, logprob in seen.items() if logprob > math.log(0.02)]
    assert likely
    for token in likely:
        expected = math.exp(seen[token])
        frequency = sum(s.tokens[0] == token for s in sampled) / len(sampled)
        assert abs(frequency - expected) < 5 * math.sqrt(expected / len(sampled))


def test_same_seed_same_samples_and_torch_untouched(make_learner: MakeLearner) -> None:
    learner = make_learner()
    assert isinstance(learner.engine, TransformersEngine)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = run(learner.engine, Sampling(4, 8), seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert run(learner.engine, Sampling(4, 8), seed=1) == first
    assert run(learner.engine, Sampling(4, 8), seed=2) != first


@pytest.mark.parametrize("limit", [1, 5, 8])
def test_more_completions_than_fit_at_once(make_learner: MakeLearner, limit: int) -> None:
    learner = make_learner(engine={"max_sequences": limit})
    widest = 0

    def watch(module: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        nonlocal widest
        widest = max(widest, len(kwargs["input_ids"]))

    learner.policy.model.register_forward_pre_hook(watch, with_kwargs=True)
    assert isinstance(learner.engine, TransformersEngine)
    groups = run(learner.engine, Sampling(4, 6))
    assert [len(group) for group in groups] == [4, 4, 4]
    assert widest <= limit


def test_greedy_takes_the_likeliest(make_learner: MakeLearner) -> None:
    learner = make_learner()
    [[one, two]] = learner.engine.generate(
        [PROMPTS[1]], Sampling(2, 6, temperature=0), 0, stop=never, progress=no_progress
    )
    assert one == two
    with torch.no_grad():
        ids = torch.tensor([[*PROMPTS[1], *one.tokens]])
        logits = learner.policy.model(input_ids=ids).logits[0, len(PROMPTS[1]) - 1 : -1, : len(learner.tokenizer)]
    assert tuple(logits.argmax(-1).tolist()) == one.tokens


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    kept = _nucleus(torch.tensor([[0.1, 0.5, 0.3, 0.1], [0.97, 0.01, 0.01, 0.01]]), 0.7)
    assert (kept > 0).tolist() == [[False, True, True, False], [True, False, False, False]]


def test_an_impossible_token_is_never_picked() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).repeat(10_000, 1)
    picked = _pick(probabilities, generator)
    assert set(picked.tolist()) == {1, 3}
    assert 0.47 < (picked == 1).float().mean() < 0.53


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(2, 6), Sampling(2, 6, 0.0), Sampling(2, 6, 0.5, 0.9)])
def test_nothing_is_sampled_from_logits_that_are_not_finite(
    make_learner: MakeLearner, bad: float, sampling: Sampling
) -> None:
    learner = make_learner()

    def poison(module: object, args: object, output: torch.Tensor) -> torch.Tensor:
        # One row, one entry, and not the first token.
        if output.shape[1] == 1 and output.shape[0] == 6:
            output[3, 0, 9] = bad
        return output

    learner.policy.model.get_output_embeddings().register_forward_hook(poison)
    assert isinstance(learner.engine, TransformersEngine)
    with pytest.raises(ModelError, match="not finite"):
        run(learner.engine, sampling)


def test_the_lowest_temperature_is_as_good_as_greedy(make_learner: MakeLearner) -> None:
    learner = make_learner()
    assert isinstance(learner.engine, TransformersEngine)
    assert run(learner.engine, Sampling(2, 6, 1e-40)) == run(learner.engine, Sampling(2, 6, 0.0))


def test_out_of_memory_halves_the_batch(make_learner: MakeLearner, caplog: pytest.LogCaptureFixture) -> None:
    learner = make_learner()
    limit = 5

    def allocate(module: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        if len(kwargs["input_ids"]) > limit:
            raise torch.OutOfMemoryError("injected")

    learner.policy.model.register_forward_pre_hook(allocate, with_kwargs=True)
    assert isinstance(learner.engine, TransformersEngine)
    groups = run(learner.engine, Sampling(4, 6))
    assert [len(group) for group in groups] == [4, 4, 4]
    assert "at most 3 completions at once" in caplog.text
    limit = 0
    with pytest.raises(OutOfMemory):
        run(learner.engine, Sampling(4, 6))


def test_stops_between_two_tokens(make_learner: MakeLearner) -> None:
    learner = make_learner()
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    with pytest.raises(Stopped):
        learner.engine.generate(PROMPTS, Sampling(2, 400), 0, stop=stop, progress=no_progress)


def test_base_is_the_model_without_its_adapter(make_learner: MakeLearner, tasks: list[Task]) -> None:
    learner = make_learner()
    assert isinstance(learner.engine, TransformersEngine)
    before = run(learner.engine, Sampling(2, 6))
    for master in learner.policy.weights.masters:
        torch.nn.init.normal_(master, std=0.3)
    assert run(learner.engine, Sampling(2, 6)) != before
    assert run(learner.engine, Sampling(2, 6), base=True) == before


def test_a_task_too_long_for_the_model_is_refused(make_learner: MakeLearner) -> None:
    task = Task(TaskRef("t", "1", "{}", 0, 0), "sum", "1" * 600, None)
    with pytest.raises(PromptError, match="room for 504"):
        make_learner().generate([task], Sampling(2, 8), 0)


def test_a_task_too_long_costs_the_others_nothing(
    make_learner: MakeLearner, tasks: list[Task], caplog: pytest.LogCaptureFixture
) -> None:
    long = Task(TaskRef("t", "1", "{}", 0, 0), "endless", "1" * 600, None)
    learner = make_learner()
    groups = learner.generate([tasks[0], long, tasks[1]], Sampling(2, 4), 1)
    assert [group.task for group in groups] == tasks[:2]
    assert "endless" in caplog.text
    assert learner.generate([], Sampling(2, 4), 1) == []


def test_chat_streams_the_text_it_returns(make_learner: MakeLearner, model_dir: Path) -> None:
    pieces: list[str] = []
    learner = make_learner()
    completion = learner.chat([{"role": "user", "content": "1?"}], Sampling(1, 30), 3, say=pieces.append)
    assert len(pieces) > 1
    # What is still open at the end may be half a character.
    assert completion.text.startswith("".join(pieces))
