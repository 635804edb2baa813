"""Evaluation while training: when it is due, what it records, and which checkpoint is kept for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from node.config import Config
from node.config_sources import load, parse_flag
from node.disk import Disk
from node.evaluations import EvaluationRecord, EvaluationsFile, KindResult, best_first
from node.learner import LearnerProcess, PromptRefused
from node.measuring import MAX_ATTEMPTS, Evaluator, held_out, result_of
from node.stop import Stop
from rl.checkpoint import CheckpointStore
from rl.rollouts import Completion, RolloutGroup, Sampling
from tests.node.records import evaluated
from verifiers.base import Task, TaskRef, VerifierError
from verifiers.sandbox import Sandbox

ROOT = Path(__file__).parents[2]
A, B, LONG = (Task(TaskRef("t", "1", "{}", 0, i), kind, "?", None) for i, kind in enumerate(("x", "x", "y")))


class Engine:
    """Answers every task that fits with its number in the group."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem
        self.asked: list[tuple[Sampling, int, bool]] = []

    async def generate(
        self, tasks: Sequence[Task], sampling: Sampling, seed: int, *, keep: bool = True
    ) -> list[RolloutGroup]:
        self.asked.append((sampling, seed, keep))
        if self.problem is not None:
            raise self.problem
        texts = tuple(Completion(str(number), True) for number in range(sampling.samples))
        return [RolloutGroup(task, texts, 0) for task in tasks if task is not LONG]


class Scorer:
    """One point for the answers that are listed."""

    def __init__(self, right: Sequence[str], broken: Sequence[Task] = ()) -> None:
        self.right = right
        self.broken = broken

    async def score(self, task: Task, completions: Sequence[str]) -> list[float]:
        if task in self.broken:
            raise VerifierError("broken")
        return [float(text in self.right) for text in completions]


class Bench:
    """An evaluator with made-up tasks, and what it says."""

    def __init__(self, path: Path, scorer: Scorer, *, every: int = 10) -> None:
        self.said: list[str] = []
        self.file = EvaluationsFile(path / "evaluations.jsonl")
        self.store = CheckpointStore(path / "checkpoints", keep=2)
        config = load([parse_flag(f"evaluation.every={every}"), parse_flag("sampling.group_size=4")], environ={}).config

        def say(level: str, text: str) -> None:
            self.said.append(text)

        disk = Disk(path, 0, Stop(), say)
        self.evaluator = Evaluator(config, cast(Sandbox, scorer), self.file, self.store, disk, 7, say)
        self.evaluator._tasks = [A, B, LONG]

    async def run(self, engine: Engine, number: int) -> EvaluationRecord | None:
        self.save(number)
        record = await self.evaluator.run(cast(LearnerProcess, engine), number, 3)
        if record is not None:
            await self.evaluator.keep(record)
        return record

    def save(self, number: int) -> None:
        self.store.commit(number, self.store.begin(number), {})


async def test_what_is_recorded(tmp_path: Path) -> None:
    bench, engine = Bench(tmp_path, Scorer(["0", "3"])), Engine()
    record = await bench.run(engine, 10)
    assert record is not None
    # The task that does not fit counts 0.
    assert (record.tasks, record.k, record.policy_step) == (3, 4, 3)
    assert (record.greedy, record.sampled, record.pass_k) == pytest.approx((2 / 3, 1 / 3, 2 / 3))
    assert record.kinds["y"] == KindResult(tasks=1, greedy=0, sampled=0, pass_k=0)
    assert list(bench.file.read()) == [record]
    (greedy, seed, kept), (sampled, *rest) = engine.asked
    assert (greedy.samples, greedy.temperature, sampled.samples, sampled.temperature) == (1, 0, 4, 1)
    assert rest == [seed, kept] == [seed, False]
    assert "held-out accuracy after round 10: greedy 0.667, sampled 0.333, pass@4 0.667" in bench.said[0]


def test_a_line_has_the_documented_keys_in_their_order() -> None:
    keys = list(EvaluationRecord.model_fields)
    assert keys == ["round", "time", "policy_step", "tasks", "greedy", "sampled", "pass_k", "k", "kinds", "seconds"]
    documented = (ROOT / "docs" / "metrics.md").read_text().partition("## `evaluations.jsonl`")[2]
    places = [documented.index(f"| `{key}` |") for key in keys]
    assert places == sorted(places)


async def test_it_is_due_every_so_many_rounds_and_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Scorer(["0"]))
    due = bench.evaluator.due
    assert [number for number in range(32) if due(number)] == [10, 20, 30]
    await bench.run(Engine(), 10)
    await bench.run(Engine(), 20)
    again = Bench(tmp_path, Scorer(["0"])).evaluator
    assert [number for number in range(32) if again.due(number)] == [30]
    # As after a kill that took round 20 back.
    again.rewind(19)
    assert [number for number in range(32) if again.due(number)] == [20, 30]
    assert [record.round for record in bench.file.read()] == [10]
    assert not any(Bench(tmp_path / "off", Scorer([]), every=0).evaluator.due(number) for number in range(300))


@pytest.mark.parametrize("problem", ["prompt", "scores"])
async def test_what_cannot_be_measured_is_said_and_not_tried_again(tmp_path: Path, problem: str) -> None:
    bench = Bench(tmp_path, Scorer(["0"], broken=[A, B] if problem == "scores" else []))
    assert await bench.run(Engine(PromptRefused("too long") if problem == "prompt" else None), 10) is None
    assert "the policy after round 10 is not evaluated" in bench.said[0]
    assert not bench.evaluator.due(10)
    assert bench.evaluator.due(20)


async def test_an_answer_that_cannot_be_scored_counts_0(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Scorer(["0"], broken=[B]))
    record = await bench.run(Engine(), 10)
    assert record is not None
    assert record.tasks == 3
    assert record.greedy == pytest.approx(1 / 3)
    assert "1 held-out tasks could not be scored" in bench.said[0]


async def test_a_learner_that_dies_in_it_twice_is_not_asked_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Scorer(["0"]))
    for _ in range(MAX_ATTEMPTS):
        assert bench.evaluator.due(10)
        with pytest.raises(RuntimeError, match="died"):
            await bench.run(Engine(RuntimeError("died")), 10)
    assert not bench.evaluator.due(10)


async def test_the_best_checkpoint_outlives_the_newest_ones(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Scorer(["0"]))
    for number, right in ((10, ["1"]), (20, ["0", "1"]), (30, ["2"]), (40, ["3"]), (50, [])):
        bench.evaluator._sandbox = cast(Sandbox, Scorer(right))
        await bench.run(Engine(), number)
    assert bench.store.rounds() == [20, 40, 50]
    # The next node of this directory knows it too, before it writes a checkpoint.
    again = Bench(tmp_path, Scorer([]))
    again.evaluator.rewind(50)
    again.save(60)
    assert again.store.rounds() == [20, 50, 60]


def test_of_equal_ones_the_later_is_the_best_and_other_tasks_do_not_count() -> None:
    assert best_first([evaluated(10, 0.5, x=1), evaluated(20, 0.7, x=1), evaluated(30, 0.7, x=1)]) == [30, 20, 10]
    assert best_first([evaluated(10, 0.9, x=1, y=1), evaluated(20, 0.2, x=2), evaluated(30, 0.1, x=2)]) == [20, 30]
    assert best_first([]) == []


def test_pass_at_k_is_the_best_of_the_answers() -> None:
    result = result_of([A, B], [[1.0], [0.0]], [[0.0, 0.5], [0.0, 1.0]])
    assert (result.greedy, result.sampled, result.pass_k) == (0.5, 0.375, 0.75)


async def test_tasks_are_shared_by_kinds_bounded_and_held_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stream:
        kinds = ("a", "b", "few")

        async def draw_distinct(self, kind: int, count: int) -> list[Task]:
            return [Task(TaskRef("t", "1", "{}", kind, i), self.kinds[kind], "?", None) for i in range(count)][
                : 9 - 4 * kind
            ]

    async def opened(*args: Any, held_out: bool = False) -> Stream:
        assert held_out
        return Stream()

    monkeypatch.setattr("node.measuring.TaskStream.open", opened)
    drawn = await held_out(cast(Sandbox, None), Config().tasks.mix, 11)
    assert [task.kind for task in drawn] == ["a"] * 4 + ["b"] * 4 + ["few"]
