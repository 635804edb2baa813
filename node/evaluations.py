"""What was measured on held-out tasks while training: `evaluations.jsonl`, one JSON object an evaluation.

`docs/metrics.md` is its reference.
"""

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from node.rounds_file import RoundLine, RoundsFile


class KindResult(BaseModel):
    """Accuracies, from 0 to 1, over `tasks` held-out tasks of one kind."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)

    tasks: int
    greedy: float
    """Mean reward of one greedy answer a task: pass@1."""
    sampled: float
    """Mean reward of the sampled answers."""
    pass_k: float
    """Mean over tasks of the best reward among them."""


class EvaluationRecord(RoundLine):
    """One evaluation of the policy as it was after a round. The keys, their order and their meaning are stable."""

    time: float
    """When it was finished: seconds since 1970 (UTC)."""

    policy_step: int
    """Optimiser steps that the policy had taken."""

    tasks: int
    """Held-out tasks that were asked, the same ones each time."""

    greedy: float
    """Mean reward of one greedy answer a task, from 0 to 1: pass@1."""

    sampled: float
    """Mean reward of `k` answers a task, sampled as in training."""

    pass_k: float
    """Mean over tasks of the best reward among these `k` answers: pass@k, where rewards are 0 or 1."""

    k: int
    """Answers sampled a task: the size of a group."""

    kinds: dict[str, KindResult]
    """The same for each kind of task."""

    seconds: float
    """Wall-clock time it took."""

    @property
    def asked(self) -> dict[str, int]:
        """How many tasks of which kind: accuracies over other tasks cannot be compared with these."""
        return {kind: result.tasks for kind, result in self.kinds.items()}


class EvaluationsFile(RoundsFile[EvaluationRecord]):
    """`evaluations.jsonl`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, EvaluationRecord)


def best_first(records: Iterable[EvaluationRecord]) -> list[int]:
    """Rounds by their sampled accuracy, the best first, of equal ones the later first.

    Only those count that asked what the newest one asked: others are of another task mix.
    """
    found = list(records)
    alike = [record for record in found if record.asked == found[-1].asked]
    return [r.round for r in sorted(alike, key=lambda record: (record.sampled, record.round), reverse=True)]


def told(record: EvaluationRecord) -> str:
    """An evaluation in a line."""
    return (
        f"greedy {record.greedy:.3f}, sampled {record.sampled:.3f}, pass@{record.k} {record.pass_k:.3f}"
        f" ({record.tasks} tasks, {record.seconds:.1f} s)"
    )
