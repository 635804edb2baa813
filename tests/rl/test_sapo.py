"""The round, against small stand-ins for the processes around it."""

from collections.abc import Sequence

import pytest

from rl.errors import TrainingError
from rl.rollouts import Completion, RolloutGroup, Sampling, ScoredGroup, UpdateStats
from rl.sapo import Phase, RoundPlan, Sapo, round_seed
from verifiers.base import Task, TaskRef, VerifierError

STATS = UpdateStats(
    policy_step=1,
    tokens_trained=4,
    loss=0.0,
    clip_fraction=0.0,
    entropy=1.0,
    grad_norm=1.0,
    kl=0.0,
    learning_rate=1e-4,
    engine_logprob_gap=None,
    token_budget=8192,
)


class Surroundings:
    """Learner, task source, scorer and pool of a round, which remember what they were asked."""

    def __init__(self) -> None:
        self.drawn = 0
        self.phases: list[Phase] = []
        self.pooled: list[ScoredGroup] = []
        self.trained: list[ScoredGroup] = []
        self.seeds: list[int] = []
        self.unscorable: set[str | None] = set()
        self.diverges = False

    async def draw(self, count: int) -> list[Task]:
        self.drawn += count
        return [
            Task(TaskRef("v", "1", "{}", 1, self.drawn + place), "sum", f"{place} + 1?", str(place + 1))
            for place in range(count)
        ]

    async def generate(self, tasks: Sequence[Task], sampling: Sampling, seed: int) -> list[RolloutGroup]:
        self.seeds.append(seed)
        completions = tuple(Completion(str(n), True, tokens=(n, 0)) for n in range(1, sampling.samples + 1))
        return [RolloutGroup(task, completions, 0) for task in tasks]

    async def score(self, task: Task, completions: Sequence[str]) -> list[float]:
        if task.answer in self.unscorable:
            raise VerifierError("the verifier is broken")
        return [float(text == task.answer) for text in completions]

    async def add(self, groups: Sequence[ScoredGroup]) -> None:
        self.pooled.extend(groups)

    async def update(self, groups: Sequence[ScoredGroup], seed: int) -> UpdateStats:
        self.seeds.append(seed)
        if self.diverges:
            raise TrainingError("the loss is nan")
        self.trained.extend(groups)
        return STATS

    def sapo(self, *, local: int = 3, seed: int = 5) -> Sapo:
        plan = RoundPlan("me", local, Sampling(samples=2, max_new_tokens=4), "mean", seed)
        return Sapo(plan, self, self, self, self, self.phases.append)


async def test_a_round_scores_with_its_own_verifiers_and_trains_on_what_it_pooled() -> None:
    around = Surroundings()
    result = await around.sapo().round(7)
    # Answers are 1, 2 and 3; the completions of every group are "1" and "2".
    assert [group.rewards for group in result.local] == [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)]
    assert [group.advantages for group in result.local] == [(0.5, -0.5), (-0.5, 0.5), (0.0, 0.0)]
    assert all(group.origin == "me" and group.round == 7 for group in result.local)
    assert around.trained == around.pooled == list(result.local)
    assert around.phases == ["draw", "generate", "score", "update"]
    assert result.reward_local == pytest.approx(1 / 3)
    assert result.informative_fraction == pytest.approx(2 / 3)
    assert result.tokens_generated == 3 * 2 * 2


async def test_a_group_that_cannot_be_scored_is_left_out_and_counted() -> None:
    around = Surroundings()
    around.unscorable = {"2"}
    result = await around.sapo().round(1)
    assert [group.group.task.answer for group in result.local] == ["1", "3"]
    assert result.unscored == 1
    assert around.trained == around.pooled == list(result.local)


async def test_verifiers_that_score_nothing_end_the_round() -> None:
    around = Surroundings()
    around.unscorable = {"1", "2", "3"}
    with pytest.raises(VerifierError, match="broken"):
        await around.sapo().round(1)
    assert around.trained == around.pooled == []


async def test_a_failed_learning_step_is_told_and_the_round_counts() -> None:
    around = Surroundings()
    around.diverges = True
    result = await around.sapo().round(1)
    assert result.stats is None
    assert result.problem == "the loss is nan"
    assert len(around.pooled) == 3


async def test_a_round_done_again_is_the_same_round() -> None:
    first, again, other = Surroundings(), Surroundings(), Surroundings()
    await first.sapo().round(4)
    await again.sapo().round(4)
    await other.sapo().round(5)
    assert first.seeds == again.seeds
    assert not set(first.seeds) & set(other.seeds)


def test_seeds_fit_a_signed_integer_and_differ_by_purpose() -> None:
    seeds = {round_seed(seed, number, purpose) for seed in (0, 2**63 - 1) for number in range(50) for purpose in "ab"}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
