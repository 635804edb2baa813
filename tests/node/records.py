"""Made-up records and groups."""

from typing import Any

from node.evaluations import EvaluationRecord, KindResult
from node.record import Record
from rl.rollouts import Completion, RolloutGroup, ScoredGroup
from verifiers.base import Task, TaskRef


def record(number: int, **changes: Any) -> Record:
    """The record of an ordinary round."""
    values: dict[str, Any] = {
        "round": number,
        "time": 1_790_000_000.5 + number,
        "policy_step": number,
        "local_groups": 8,
        "external_groups": 0,
        "reward_local": 0.25,
        "reward_external": None,
        "informative_fraction": 0.5,
        "tokens_generated": 640,
        "seconds_generate": 2.0,
        "seconds_score": 0.25,
        "seconds_update": 1.75,
        "tokens_trained": 320,
        "loss": -0.0125,
        "clip_fraction": 0.0,
        "entropy": 1.5,
        "grad_norm": 0.75,
        "engine_logprob_gap": 2e-6,
        "peers": 0,
        "batches_sent": 0,
        "batches_received": 0,
        "rejected": {},
    }
    return Record(**(values | changes))


def evaluated(number: int, sampled: float, **kinds: int) -> EvaluationRecord:
    """A made-up evaluation: how many tasks of which kind were asked, and the sampled accuracy."""
    results = {kind: KindResult(tasks=tasks, greedy=0, sampled=0, pass_k=0) for kind, tasks in kinds.items()}
    return EvaluationRecord(
        round=number, time=0, policy_step=0, tasks=1, greedy=0, sampled=sampled, pass_k=0, k=4, kinds=results, seconds=1
    )


def scored_group(
    kind: str = "gcd",
    prompt: str = "What?",
    texts: tuple[str, ...] = ("1", "2"),
    rewards: tuple[float, ...] = (0.0, 1.0),
) -> ScoredGroup:
    """A scored group of one made-up task."""
    task = Task(TaskRef("reasoning_gym", "1", "{}", 0, 0), kind, prompt, None)
    completions = tuple(Completion(text, True) for text in texts)
    return ScoredGroup(RolloutGroup(task, completions, 0), "me", 1, rewards, tuple(0.0 for _ in rewards))
