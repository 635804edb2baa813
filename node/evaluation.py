"""Held-out accuracy of the base model and of the current policy, per kind of task.

All nodes evaluate on the same held-out tasks, which none of them trains on (`verifiers.base.is_held_out`).
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import trio
from pydantic import BaseModel, ConfigDict

from node.config import Config
from node.policy import CurrentPolicy
from rl.rollouts import Sampling
from verifiers.base import HELD_OUT_SHARE, Task, TaskRef, VerifierError
from verifiers.sandbox import Sandbox, open_sandbox
from verifiers.stream import HELD_OUT_SEED, TaskStream

Progress = Callable[[str, int, int, str], None]
"""Called with what is being done, how much of it is done, of how much, and in which unit."""


class Accuracy(BaseModel):
    """Mean reward over tasks, from 0 to 1, and its standard error over tasks (null for a single task)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: float
    error: float | None


class ModelScore(BaseModel):
    """One model on one kind of task: its greedy answer, and the mean over answers sampled as in training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    greedy: Accuracy
    sampled: Accuracy


class KindScore(BaseModel):
    """One kind of task. `base` is null if it has no held-out task, `policy` also if nothing had been trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    tasks: int
    base: ModelScore | None
    policy: ModelScore | None


class Evaluation(BaseModel):
    """What `swarmnode eval --json` prints, and keeps as `evaluation.json` in the data directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: float
    model: str
    round: int | None
    samples: int
    kinds: list[KindScore]
    overall: KindScore


def evaluate(config: Config, current: CurrentPolicy, progress: Progress) -> Evaluation:
    """Held-out accuracy on the task mix. A kind without a held-out task is listed with none.

    A task whose prompt does not fit the model's context cannot be answered, so it counts 0. Raises VerifierError if the
    tasks cannot be made or no kind has a held-out one, LearnerError if the model cannot answer them.
    """
    return trio.run(_evaluate, config, current, progress)


async def _evaluate(config: Config, current: CurrentPolicy, progress: Progress) -> Evaluation:
    async with open_sandbox(config.verifiers, [config.node.data_dir]) as sandbox:
        kinds, tasks = await held_out(sandbox, config, progress)
        base = await scores("base model", True, tasks, sandbox, config, current, progress)
        policy = None
        if current.checkpoint is not None:
            policy = await scores("policy", False, tasks, sandbox, config, current, progress)
    places = {kind: [place for place, task in enumerate(tasks) if task.kind == kind] for kind in kinds}
    return Evaluation(
        time=time.time(),
        model=str(current.learner.describe()["model"]),
        round=current.checkpoint.round if current.checkpoint else None,
        samples=config.evaluation.samples,
        kinds=[_kind_score(kind, places[kind], base, policy) for kind in kinds],
        overall=_kind_score("all", range(len(tasks)), base, policy),
    )


async def held_out(sandbox: Sandbox, config: Config, progress: Progress) -> tuple[list[str], list[Task]]:
    """All kinds of the mix, and the held-out tasks of those that have any."""
    stream = await TaskStream.open(sandbox, config.tasks.mix, HELD_OUT_SEED, held_out=True)
    tasks: list[Task] = []
    for number in range(len(stream.kinds)):
        progress("held-out tasks", number, len(stream.kinds), "kinds")
        tasks += await stream.draw_distinct(number, config.evaluation.per_task)
    if not tasks:
        raise VerifierError(
            f"no kind of task has a held-out question ({', '.join(stream.kinds)}): one question in {HELD_OUT_SHARE} is"
            " held out, by a hash of its text; widen the options, or add questions to the file"
        )
    return stream.kinds, tasks


Rewards = list[list[float]]
"""For each task the rewards of its completions; a single 0 for a task that could not be shown."""


async def scores(
    who: str,
    base: bool,
    tasks: list[Task],
    sandbox: Sandbox,
    config: Config,
    current: CurrentPolicy,
    progress: Progress,
) -> tuple[Rewards, Rewards]:
    """Greedy and sampled rewards of one model, a row for each of `tasks`.

    The learner leaves out tasks that do not fit the model's context, so its groups are matched by the task they name.
    """
    sampling = config.sampling
    greedy = Sampling(1, sampling.max_new_tokens, temperature=0.0)
    sampled = Sampling(config.evaluation.samples, sampling.max_new_tokens, sampling.temperature, sampling.top_p)
    rewards = []
    for name, drawing in (("greedy", greedy), ("sampled", sampled)):
        what = f"{who}, {name}"
        groups = current.learner.generate(
            tasks, drawing, config.node.seed or 0, base=base, progress=partial(progress, what)
        )
        scored: dict[TaskRef, list[float]] = {}
        for number, group in enumerate(groups):
            progress(f"{what}, scoring", number, len(groups), "tasks")
            texts = [completion.text for completion in group.completions]
            scored[group.task.ref] = await sandbox.score(group.task, texts)
        rewards.append([scored.get(task.ref, [0.0]) for task in tasks])
    return rewards[0], rewards[1]


def _kind_score(
    kind: str, places: Sequence[int], base: tuple[Rewards, Rewards], policy: tuple[Rewards, Rewards] | None
) -> KindScore:
    if not places:
        return KindScore(kind=kind, tasks=0, base=None, policy=None)
    policy_score = model_score(policy, places) if policy else None
    return KindScore(kind=kind, tasks=len(places), base=model_score(base, places), policy=policy_score)


def model_score(rewards: tuple[Rewards, Rewards], places: Sequence[int]) -> ModelScore:
    """Greedy and sampled accuracy on the tasks at these places."""
    greedy, sampled = (accuracy([statistics.fmean(part[place]) for place in places]) for part in rewards)
    return ModelScore(greedy=greedy, sampled=sampled)


def accuracy(values: Sequence[float]) -> Accuracy:
    """Mean and standard error of one value a task."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return Accuracy(mean=statistics.fmean(values), error=error)


def table(evaluation: Evaluation) -> list[str]:
    """The result as lines of text, in percent, the totals with their standard errors."""
    rows = [["task", "tasks", "base greedy", "base sampled"]]
    if evaluation.round is not None:
        rows[0] += ["policy greedy", "policy sampled"]
    for score in (*evaluation.kinds, evaluation.overall):
        with_error = score is evaluation.overall
        cells = [_cell(a, with_error) for model in (score.base, score.policy) if model for a in _both(model)]
        cells = cells or ["none held out", *[""] * (len(rows[0]) - 3)]
        rows.append([score.kind, str(score.tasks), *cells])
    return ruled(rows)


def ruled(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table whose first row is its head and whose last row is its sum, as lines of text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(_aligned(row, widths)) for row in rows]
    return [lines[0], "-" * len(lines[0]), *lines[1:-1], "-" * len(lines[0]), lines[-1]]


def _both(model: ModelScore) -> tuple[Accuracy, Accuracy]:
    return model.greedy, model.sampled


def _aligned(row: Sequence[str], widths: Sequence[int]) -> Iterable[str]:
    return (
        text.ljust(width) if column == 0 else text.rjust(width)
        for column, (text, width) in enumerate(zip(row, widths, strict=True))
    )


def _cell(accuracy: Accuracy, with_error: bool) -> str:
    error = f" ± {100 * accuracy.error:.1f}" if with_error and accuracy.error is not None else ""
    return f"{100 * accuracy.mean:.1f}{error}"
