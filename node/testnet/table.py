"""What came out of a testnet: a row a node, as a table or as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from node.testnet.fleet import Member, State
from node.testnet.watch import MEAN, mean_reward
from node.text import clean


@dataclass(frozen=True, slots=True)
class Outcome:
    """One node over its whole life, earlier runs in the same folder included. Rewards are means over 50 rounds."""

    name: str
    model: str
    state: State
    status: int | None
    kills: int
    rounds: int
    reward_first: float | None
    reward_last: float | None
    rounds_with_external: int
    external_groups: int
    batches_sent: int
    batches_received: int
    rejected: dict[str, int]


def outcome(member: Member) -> Outcome:
    """What a node has done."""
    steps = member.progress.steps
    return Outcome(
        name=member.plan.name,
        model=member.plan.model,
        state=member.state,
        status=member.status,
        kills=member.kills,
        rounds=member.progress.round,
        reward_first=mean_reward(steps[:MEAN]),
        reward_last=mean_reward(steps[-MEAN:]),
        rounds_with_external=sum(step.external > 0 for step in steps),
        external_groups=sum(step.external for step in steps),
        batches_sent=sum(step.sent for step in steps),
        batches_received=sum(step.received for step in steps),
        rejected=dict(member.progress.rejected),
    )


_HEAD = ("node", "model", "state", "rounds", "first 50", "last 50", "mixed", "groups", "sent", "got", "rejected")
_LEGEND = (
    "",
    "first 50, last 50: mean reward of its own rollouts over so many rounds",
    "mixed: rounds that trained on groups of others too; groups: how many of those; sent, got: batches",
)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Lines for a terminal."""
    rows = [_HEAD, *(_row(outcome) for outcome in outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, *_LEGEND]


def rejections(rejected: dict[str, int]) -> str:
    """The reasons and how often, as in `wrong_prompt 2, stale 1`."""
    return ", ".join(f"{clean(reason)} {count}" for reason, count in sorted(rejected.items())) or "none"


def reward(value: float | None) -> str:
    """A mean reward for a reader."""
    return "-" if value is None else f"{value:.3f}"


def _row(outcome: Outcome) -> tuple[str, ...]:
    killed = f", killed {outcome.kills} times" if outcome.kills > 1 else ", killed once" if outcome.kills else ""
    return (
        outcome.name,
        clean(outcome.model),
        outcome.state + killed,
        str(outcome.rounds),
        reward(outcome.reward_first),
        reward(outcome.reward_last),
        str(outcome.rounds_with_external),
        str(outcome.external_groups),
        str(outcome.batches_sent),
        str(outcome.batches_received),
        rejections(outcome.rejected),
    )
