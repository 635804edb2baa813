"""Evaluation while training: every so many rounds the policy answers held-out tasks, and nothing else changes by it.

The tasks are the same each time and on every node with the same mix. Random numbers follow from (seed, round), nothing
is added to the pool or sent, and the likelihood gate is not told, so the rounds are those of a run without it.
"""

import time
from collections.abc import Callable, Sequence
from statistics import fmean

import trio

from node.config import Config
from node.disk import Disk
from node.evaluations import EvaluationRecord, EvaluationsFile, KindResult, best_first, told
from node.learner import LearnerProcess, PromptRefused
from rl.checkpoint import CheckpointStore
from rl.rollouts import RolloutGroup, Sampling
from rl.sapo import round_seed
from verifiers.base import Task, TaskRef, VerifierError
from verifiers.sandbox import Sandbox, SandboxError
from verifiers.settings import MixEntry
from verifiers.stream import HELD_OUT_SEED, TaskStream

MAX_ATTEMPTS = 2
"""An evaluation that fails, or in which the learner dies, is tried once more; then training goes on without it."""


class Evaluator:
    """Measures the policy when it is due, writes it down, and keeps the best checkpoint from being pruned."""

    def __init__(
        self,
        config: Config,
        sandbox: Sandbox,
        file: EvaluationsFile,
        checkpoints: CheckpointStore,
        disk: Disk,
        seed: int,
        say: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._sandbox = sandbox
        self._file = file
        self._checkpoints = checkpoints
        self._disk = disk
        self._seed = seed
        self._say = say
        self._tasks: list[Task] | None = None
        self._attempts: dict[int, int] = {}

    def due(self, number: int) -> bool:
        """Whether the policy after round `number` is to be measured and has not been. Raises RecordError."""
        every = self._config.evaluation.every if self._config.training.train else 0
        if every == 0 or number == 0 or number % every or self._attempts.get(number, 0) >= MAX_ATTEMPTS:
            return False
        return all(record.round < number for record in self._file.last(1))

    def rewind(self, last_round: int) -> None:
        """Drop the evaluations after a round. Raises OSError, RecordError."""
        self._file.rewind(last_round)
        self._keep_best()

    async def run(self, learner: LearnerProcess, number: int, policy_step: int) -> EvaluationRecord | None:
        """Measure the policy after round `number`, for `keep`.

        None if it cannot be measured, which is said, and training goes on. Raises SandboxError, LearnerDied,
        LearnerFailed.
        """
        self._attempts[number] = self._attempts.get(number, 0) + 1
        begun = time.monotonic()
        try:
            if self._tasks is None:
                self._tasks = await held_out(self._sandbox, self._config.tasks.mix, self._config.evaluation.tasks)
            greedy, sampled = await self._answers(learner, self._tasks, number)
        except SandboxError:
            raise
        except (VerifierError, PromptRefused) as error:
            self._attempts[number] = MAX_ATTEMPTS
            self._say("warning", f"the policy after round {number} is not evaluated: {error}")
            return None
        result = result_of(self._tasks, greedy, sampled)
        kinds = dict.fromkeys(task.kind for task in self._tasks)
        return EvaluationRecord(
            round=number,
            time=time.time(),
            policy_step=policy_step,
            **result.model_dump(),
            k=self._config.sampling.group_size,
            kinds={kind: result_of(self._tasks, greedy, sampled, kind) for kind in kinds},
            seconds=round(time.monotonic() - begun, 4),
        )

    async def keep(self, record: EvaluationRecord) -> None:
        """Write down what was measured, and tell it. Raises DiskFullError if told to stop while it waits."""

        async def write() -> None:
            await trio.to_thread.run_sync(self._file.append, record)

        await self._disk.write("evaluations.jsonl", write)
        self._keep_best()
        best = ", the best so far" if self._checkpoints.best == record.round else ""
        self._say("info", f"held-out accuracy after round {record.round}: {told(record)}{best}")

    def _keep_best(self) -> None:
        there = set(self._checkpoints.rounds())
        ranked = [number for number in best_first(self._file.read()) if number in there]
        self._checkpoints.best = ranked[0] if ranked else None

    async def _answers(
        self, learner: LearnerProcess, tasks: Sequence[Task], number: int
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Rewards of the greedy answer and of sampled ones, a row for each task."""
        sampling = self._config.sampling
        greedy = Sampling(1, sampling.max_new_tokens, temperature=0.0)
        sampled = Sampling(sampling.group_size, sampling.max_new_tokens, sampling.temperature, sampling.top_p)
        seed = round_seed(self._seed, number, "evaluate")
        rows = []
        for drawing in (greedy, sampled):
            groups = await learner.generate(tasks, drawing, seed, keep=False)
            rows.append(await self._rewards(tasks, groups, drawing.samples))
        return rows[0], rows[1]

    async def _rewards(self, tasks: Sequence[Task], groups: Sequence[RolloutGroup], samples: int) -> list[list[float]]:
        """What could not be asked or scored counts 0, as the tasks have to stay the same from time to time.

        Raises VerifierError if none could be scored.
        """
        scored: dict[TaskRef, list[float]] = {}
        failures: list[VerifierError] = []
        for group in groups:
            try:
                scored[group.task.ref] = await self._sandbox.score(group.task, [c.text for c in group.completions])
            except SandboxError:
                raise
            except VerifierError as error:
                failures.append(error)
        if failures and not scored:
            raise failures[0]
        if failures:
            self._say("warning", f"{len(failures)} held-out tasks could not be scored and count 0: {failures[0]}")
        return [scored.get(task.ref, [0.0] * samples) for task in tasks]


async def held_out(sandbox: Sandbox, mix: Sequence[MixEntry], most: int) -> list[Task]:
    """At most `most` held-out tasks, as many of each kind as of any other, always the same. Raises VerifierError."""
    stream = await TaskStream.open(sandbox, mix, HELD_OUT_SEED, held_out=True)
    each, more = divmod(most, len(stream.kinds))
    tasks: list[Task] = []
    for number in range(len(stream.kinds)):
        tasks += await stream.draw_distinct(number, each + (number < more))
    if not tasks:
        raise VerifierError(
            f"no kind of task has a held-out question ({', '.join(stream.kinds)}): [evaluation] every = 0 asks for none"
        )
    return tasks


def result_of(
    tasks: Sequence[Task], greedy: Sequence[list[float]], sampled: Sequence[list[float]], kind: str | None = None
) -> KindResult:
    """Accuracies over all tasks, or over those of one kind; rows of rewards are in the order of `tasks`."""
    places = [place for place, task in enumerate(tasks) if kind in (None, task.kind)]
    return KindResult(
        tasks=len(places),
        greedy=fmean(greedy[place][0] for place in places),
        sampled=fmean(fmean(sampled[place]) for place in places),
        pass_k=fmean(max(sampled[place]) for place in places),
    )
