"""vLLM itself on the small model: it samples from the policy, and goes on doing so when the policy changes."""

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl.batches import Group, Row
from rl.engines import adapters
from rl.engines.base import InferenceEngine, Sampled
from rl.errors import EngineError, OutOfMemory, Stopped
from rl.learner import Learner
from rl.rollouts import Sampling
from rl.settings import LearnerSettings
from rl.work import never, no_progress
from tests.rl.conftest import write_model
from tests.rl.learning import scored
from verifiers.base import Task

# vLLM keeps much in global variables, so one engine is closed before the next one is opened, but for
# the first, which comes first.
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [[1, 2, 3], list(range(40, 110)), [7]]


def make(directory: Path, **sections: dict[str, Any]) -> Learner:
    settings: dict[str, Any] = {
        "model": {"name": str(directory), "device": "cpu", "dtype": "float32"},
        "lora": {"rank": 4},
        "sampling": {"max_new_tokens": 8},
        "training": {"lr": 1e-2},
    }
    settings |= {name: {**settings.get(name, {}), **values} for name, values in sections.items()}
    settings["engine"] = {"kind": "vllm", "memory_gb": 0.05, "max_logprob_gap": 1e-3, **settings.get("engine", {})}
    return Learner(LearnerSettings.model_validate(settings))


@pytest.fixture(scope="module")
def trained(wide_model_dir: Path) -> Learner:
    """A policy whose engine is never opened."""
    learner = make(wide_model_dir)
    stir(learner, 0.1)
    return learner


@pytest.fixture(scope="module")
def merged(trained: Learner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learner]:
    """On what `export` wrote of `trained`, as its base model."""
    directory = tmp_path_factory.mktemp("exported")
    trained.export(directory, merged=True)
    learner = make(directory)
    stir(learner, 0.1)
    yield learner
    learner.close()


def stir(learner: Learner, std: float) -> None:
    """Other weights, as far from the old ones as training would take weeks to go."""
    with torch.no_grad():
        for master in learner.policy.weights.masters:
            master.add_(torch.randn_like(master) * std)
    learner.policy.weights.publish()
    learner._live.refresh()


def run(engine: InferenceEngine, sampling: Sampling, seed: int = 0, *, base: bool = False) -> list[list[Sampled]]:
    return engine.generate(PROMPTS, sampling, seed, base=base, stop=never, progress=no_progress)


def left_behind() -> set[Path]:
    return set(adapters.SHARED_MEMORY.glob(f"{adapters.PREFIX}{os.getpid()}-*"))


def difference(learner: Learner, sampled: list[list[Sampled]], *, base: bool = False) -> float:
    """The largest difference between a log-prob that was told and what training computes."""
    rows = [[Row(s.tokens, 0.0, s.logprobs) for s in group] for group in sampled]
    groups = [Group(tuple(p), tuple(r)) for p, r in zip(PROMPTS, rows, strict=True)]
    known = learner.policy.logprobs(groups, base=base)
    return max(float((known[r] - torch.tensor(r.sampled)).abs().max()) for group in rows for r in group)


def test_it_loads_what_export_wrote_and_samples_from_it(trained: Learner, merged: Learner) -> None:
    sampled = run(merged.engine, Sampling(4, 12), 2, base=True)
    assert difference(trained, sampled) < 1e-4
    assert difference(merged, sampled) > 1e-2, "another policy"


def test_reported_logprobs_are_those_of_training(merged: Learner) -> None:
    sampled = run(merged.engine, Sampling(6, 12), 1)
    assert [len(group) for group in sampled] == [6, 6, 6]
    assert difference(merged, sampled) < 1e-4
    assert difference(merged, sampled, base=True) > 0.05
    base = run(merged.engine, Sampling(6, 12), 1, base=True)
    assert difference(merged, base, base=True) < 1e-4
    assert difference(merged, run(merged.engine, Sampling(6, 12), 1)) < 1e-4


def test_finished_and_truncated_are_told_apart(merged: Learner) -> None:
    completions = [c for group in run(merged.engine, Sampling(64, 40), 1) for c in group]
    eos = merged.tokenizer.eos_token_id
    assert {c.finished for c in completions} == {True, False}
    for completion in completions:
        assert completion.finished == (completion.tokens[-1] == eos)
        assert completion.finished or len(completion.tokens) == 40
        assert eos not in completion.tokens[:-1]
        assert max(completion.tokens) < len(merged.tokenizer)


def test_frequencies_are_those_of_the_plain_softmax(merged: Learner) -> None:
    [sampled] = merged.engine.generate([PROMPTS[0]], Sampling(4096, 1), 3, stop=never, progress=no_progress)
    seen = {s.tokens[0]: s.logprobs[0] for s in sampled if s.logprobs}
    likely = [token for token, logprob in seen.items() if logprob > math.log(0.02)]
    assert likely
    for token in likely:
        expected = math.exp(seen[token])
        frequency = sum(s.tokens[0] == token for s in sampled) / len(sampled)
        assert abs(frequency - expected) < 5 * math.sqrt(expected / len(sampled))


def test_same_seed_same_samples_and_generators_untouched(merged: Learner) -> None:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    expected = (torch.rand(3).tolist(), random.random(), np.random.random())
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    first = run(merged.engine, Sampling(4, 8), seed=1)
    assert (torch.rand(3).tolist(), random.random(), np.random.random()) == expected
    assert run(merged.engine, Sampling(4, 8), seed=2) != first
    assert run(merged.engine, Sampling(4, 8), seed=1) == first


def test_greedy_takes_the_likeliest_and_top_p_leaves_out_the_rest(merged: Learner) -> None:
    [[one, two]] = merged.engine.generate(
        [PROMPTS[1]], Sampling(2, 6, temperature=0), 0, stop=never, progress=no_progress
    )
    assert one == two
    with torch.no_grad():
        ids = torch.tensor([[*PROMPTS[1], *one.tokens]])
        logits = merged.policy.model(input_ids=ids).logits[0, len(PROMPTS[1]) - 1 : -1, : len(merged.tokenizer)]
    assert tuple(logits.argmax(-1).tolist()) == one.tokens
    [narrow] = merged.engine.generate([PROMPTS[1]], Sampling(64, 1, 1.0, 0.05), 0, stop=never, progress=no_progress)
    [wide] = merged.engine.generate([PROMPTS[1]], Sampling(64, 1), 0, stop=never, progress=no_progress)
    assert len({s.tokens for s in narrow}) < len({s.tokens for s in wide})


def test_it_stops_between_two_steps_and_goes_on_afterwards(merged: Learner) -> None:
    before = run(merged.engine, Sampling(2, 8), 4)
    asked = 0
    told: list[tuple[int, int]] = []

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 5

    with pytest.raises(Stopped):
        merged.engine.generate(
            PROMPTS, Sampling(2, 400), 0, stop=stop, progress=lambda done, total, _: told.append((done, total))
        )
    assert asked == 6
    assert told
    assert all(total == 6 for _, total in told)
    assert run(merged.engine, Sampling(2, 8), 4) == before


def test_chat_streams_the_tokens_it_returns(merged: Learner) -> None:
    said: list[int] = []
    [[one]] = merged.engine.generate(
        [PROMPTS[0]], Sampling(1, 20), 3, stop=never, progress=no_progress, emit=said.append
    )
    assert tuple(said) == one.tokens


@pytest.mark.parametrize(("error", "raised"), [(RuntimeError("broken"), EngineError), (MemoryError(), OutOfMemory)])
def test_what_vllm_raises_costs_a_rebuild(
    merged: Learner, tasks: list[Task], monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    merged._live.take()
    groups = merged.generate(tasks, Sampling(2, 8), 3)
    engine: Any = merged.engine

    def fail() -> None:
        raise error

    monkeypatch.setattr(engine._llm.llm_engine, "step", fail)
    with pytest.raises(raised):
        run(engine, Sampling(2, 8))
    assert merged.generate(tasks, Sampling(2, 8), 3) == groups
    assert merged.engine is not engine
    assert merged._live.take().restarts == 1


@pytest.mark.parametrize("way", ["merged", "adapter", "full", "tied"])
def test_every_update_is_live(wide_model_dir: Path, tasks: list[Task], way: str, tmp_path: Path) -> None:
    rank, weights = (4, way) if way in ("merged", "adapter") else (0, "merged")
    directory = wide_model_dir
    if way == "tied":
        (directory := tmp_path / "tied").mkdir()
        write_model(directory, head_dim=32, tie_word_embeddings=True)
    learner = make(directory, lora={"rank": rank}, engine={"weights": weights}, training={"lr": 5e-3})
    threads = torch.get_num_threads()
    before = left_behind()
    try:
        for number in range(4):
            groups = learner.generate(tasks, Sampling(4, 8), number)
            stats = learner.update([scored(g, [1, 0, 0, 1]) for g in groups], number)
            assert stats.engine_restarts == 0
            assert stats.engine_logprob_gap is not None
            assert stats.engine_logprob_gap < 1e-3
            assert stats.seconds_sync > 0
        stir(learner, 0.2)
        assert difference(learner, run(learner.engine, Sampling(4, 8))) < 1e-3
        assert difference(learner, run(learner.engine, Sampling(4, 8), base=True), base=True) < 1e-3
        learner.save(tmp_path)
        stir(learner, 0.2)
        learner.load(tmp_path)
        assert difference(learner, run(learner.engine, Sampling(4, 8))) < 1e-3
        torch.set_num_threads(threads + 1)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
        learner.close()
    assert left_behind() == before


def test_a_wrong_adapter_is_caught(wide_model_dir: Path, tasks: list[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the facts of the machine allow to happen: the files that the engine reads are another policy's."""
    learner = make(wide_model_dir, engine={"weights": "adapter", "max_logprob_gap": 0.06})
    save = learner.policy.weights.save
    try:
        learner.generate(tasks, Sampling(8, 8), 0)

        def save_wrong(directory: Path) -> None:
            kept = learner.policy.weights.snapshot()
            with torch.no_grad():
                for master in learner.policy.weights.masters:
                    master.copy_(torch.randn_like(master) * 0.2)
            learner.policy.weights.publish()
            save(directory)
            learner.policy.weights.restore(kept)

        monkeypatch.setattr(learner.policy.weights, "save", save_wrong)
        stir(learner, 0.0)
        with pytest.raises(EngineError, match=r"differ by \d\.\d+ nats on average, more than engine\.max_logprob_gap"):
            learner.generate(tasks, Sampling(8, 8), 1)
        monkeypatch.undo()
        assert learner.generate(tasks, Sampling(8, 8), 2)
    finally:
        learner.close()


@pytest.mark.parametrize("given", [{"tensor_paralell_size": 2}, {"block_size": "many"}])
def test_arguments_that_vllm_does_not_take_are_named(wide_model_dir: Path, given: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=next(iter(given))):
        make(wide_model_dir, engine={"args": given}).open_engine()


def test_numbers_that_are_none_are_loud(wide_model_dir: Path, tasks: list[Task]) -> None:
    learner = make(wide_model_dir)
    learner.open_engine()
    with torch.no_grad():
        for master in learner.policy.weights.masters:
            master.fill_(math.nan)
    try:
        with pytest.raises(EngineError, match="not finite"):
            run(learner.engine, Sampling(2, 8))
    finally:
        learner.close()
