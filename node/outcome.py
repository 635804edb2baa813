"""What is told of a finished round."""

import time
from collections.abc import Sequence

from node.exchange import Counts
from node.record import Record
from rl.rollouts import ScoredGroup
from rl.sapo import RoundResult


def record_of(result: RoundResult, policy_step: int, counts: Counts, replaced: int) -> Record:
    """The line for a finished round. `counts` and `replaced` (learners that were): since the last record."""
    stats = result.stats
    # Without a step there is no loss to speak of; 0 would read as one.
    stepped = stats if stats is not None and stats.tokens_trained > 0 else None
    return Record(
        round=result.number,
        time=time.time(),
        policy_step=policy_step,
        local_groups=len(result.local),
        external_groups=len(result.external),
        reward_local=result.reward_local,
        reward_external=result.reward_external,
        informative_fraction=result.informative_fraction,
        tokens_generated=result.tokens_generated,
        seconds_generate=result.seconds_generate,
        seconds_score=result.seconds_score,
        seconds_update=result.seconds_update,
        tokens_trained=stepped.tokens_trained if stepped else 0,
        loss=stepped.loss if stepped else None,
        clip_fraction=stepped.clip_fraction if stepped else None,
        entropy=stepped.entropy if stepped else None,
        grad_norm=stepped.grad_norm if stepped else None,
        engine_logprob_gap=stats.engine_logprob_gap if stats else None,
        peers=counts.peers,
        batches_sent=result.batches_sent,
        batches_received=counts.batches_received,
        rejected={**counts.rejected, **({"unscored": result.unscored} if result.unscored else {})},
        seconds_share=result.seconds_share,
        engine_restarts=replaced + (stats.engine_restarts if stats else 0),
        seconds_sync=stats.seconds_sync if stats else 0.0,
        gate_refused=stats.refused_completions if stats else 0,
        gate_threshold=stats.gate if stats else None,
        learning_rate=stats.learning_rate if stats and stats.tokens_trained else None,
    )


def rewards_by_kind(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Mean reward of each kind of task, by name."""
    rewards: dict[str, list[float]] = {}
    for scored in groups:
        rewards.setdefault(scored.group.task.kind, []).append(scored.mean_reward)
    return {kind: sum(values) / len(values) for kind, values in sorted(rewards.items())}
