"""The round, against small stand-ins for the processes around it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing

from rl.errors import TrainingError
from rl.protocols import Swarm
from rl.rollouts import Completion, RolloutGroup, Sampling, ScoredGroup, UpdateStats
from rl.sapo import MAX_CHOICES, Phase, RoundPlan, Sapo, round_seed
from rl.selection import Candidate, Fill, Positives, Selection, Uniform
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


SECONDS_AHEAD = 1234.5


class EngineBroken(Exception):
    pass


class Surroundings:
    """Learner, task source, scorer, pool and swarm of a round, which remember what they were asked."""

    def __init__(self) -> None:
        self.drawn = 0
        self.phases: list[Phase] = []
        self.pooled: list[ScoredGroup] = []
        self.trained: list[ScoredGroup] = []
        self.seeds: list[int] = []
        self.unscorable: set[str | None] = set()
        self.diverges = False
        self.others: dict[int, ScoredGroup] = {}
        self.asked: list[tuple[int, int]] = []
        self.unusable: set[int] = set()
        self.used_before: set[int] = set()
        self.settled: list[tuple[set[int], set[int], int]] = []
        self.too_long: set[int] = set()
        self.checked: list[ScoredGroup] = []
        self.shared: list[tuple[list[ScoredGroup], int]] = []
        self.selection: Selection = Uniform()
        self.unlikely: set[int] = set()
        self.story: list[str] = []
        self.breaks_at: int | None = None
        self.scoring: trio.Event | None = None
        self.ahead: list[RolloutGroup] = []

    def receive(self, *origins: str) -> None:
        """Groups of others, with ids and indices 0, 1, 2 ..."""
        for key, origin in enumerate(origins):
            task = Task(TaskRef("v", "1", "{}", 2, key), "sum", f"{key} + 1?", str(key + 1))
            answers = (Completion("1", True), Completion("2", True))
            self.others[key] = ScoredGroup(RolloutGroup(task, answers, 0), origin, 1, (1.0, 0.0), (0.5, -0.5))

    async def candidates(self, since: int, reuse: int) -> list[Candidate]:
        self.asked.append((since, reuse))
        return [
            Candidate(
                key, one.origin, one.round, "sum", len(one.rewards), one.mean_reward, int(key in self.used_before)
            )
            for key, one in self.others.items()
            if key not in self.unusable
        ]

    async def take(self, ids: Collection[int]) -> dict[int, ScoredGroup]:
        return {key: self.others[key] for key in ids}

    async def settle(self, used: Collection[int], refused: Collection[int], number: int) -> None:
        self.settled.append((set(used), set(refused), number))
        self.unusable.update(refused)

    async def fits(self, groups: Sequence[ScoredGroup]) -> list[bool]:
        self.checked.extend(groups)
        return [group.group.task.ref.index not in self.too_long for group in groups]

    async def share(self, groups: Sequence[ScoredGroup], number: int, /) -> int:
        self.shared.append((list(groups), number))
        return 2

    @property
    def cursor(self) -> Mapping[str, int]:
        return {"position": self.drawn}

    async def draw(self, count: int) -> list[Task]:
        self.drawn += count
        return [
            Task(TaskRef("v", "1", "{}", 1, self.drawn + place), "sum", f"{place} + 1?", str(place + 1))
            for place in range(count)
        ]

    async def generate(self, tasks: Sequence[Task], sampling: Sampling, seed: int) -> list[RolloutGroup]:
        self.seeds.append(seed)
        round_of = tasks[-1].ref.index // len(tasks)
        self.story.append(f"sample {round_of}")
        if round_of == self.breaks_at:
            raise EngineBroken("no engine")
        completions = tuple(Completion(str(n), True, tokens=(n, 0)) for n in range(1, sampling.samples + 1))
        return [RolloutGroup(task, completions, 0) for task in tasks]

    async def generate_ahead(self, tasks: Sequence[Task], sampling: Sampling, seed: int) -> None:
        self.ahead = await self.generate(tasks, sampling, seed)

    async def generated_ahead(self) -> tuple[list[RolloutGroup], float]:
        return self.ahead, SECONDS_AHEAD

    async def score(self, task: Task, completions: Sequence[str]) -> list[float]:
        if self.scoring is not None:
            await self.scoring.wait()
        if task.answer in self.unscorable:
            raise VerifierError("the verifier is broken")
        return [float(text == task.answer) for text in completions]

    async def add(self, groups: Sequence[ScoredGroup]) -> None:
        self.pooled.extend(groups)

    async def update(self, groups: Sequence[ScoredGroup], seed: int) -> UpdateStats:
        self.seeds.append(seed)
        self.story.append(f"update {groups[0].round}")
        if self.diverges:
            raise TrainingError("the loss is nan")
        self.trained.extend(groups)
        refused = tuple(
            place
            for place, group in enumerate(groups)
            if group.origin != "me" and group.group.task.ref.index in self.unlikely
        )
        return replace(STATS, refused=refused, refused_completions=len(refused), gate=-4.5)

    def sapo(self, swarm: Swarm | None = None, **changes: Any) -> Sapo:
        plan = RoundPlan(
            origin="me",
            local=3,
            external=4,
            share="all",
            max_age=20,
            reuse=1,
            per_peer=2,
            sampling=Sampling(samples=2, max_new_tokens=4),
            advantage="mean",
            seed=5,
        )
        return Sapo(replace(plan, **changes), self, self, self, self, swarm or self, self.selection, self.phases.append)


async def test_a_round_scores_with_its_own_verifiers_and_trains_on_what_it_pooled() -> None:
    around = Surroundings()
    result = await around.sapo().round(7)
    # Answers are 1, 2 and 3; the completions of every group are "1" and "2".
    assert [group.rewards for group in result.local] == [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)]
    assert [group.advantages for group in result.local] == [(0.5, -0.5), (-0.5, 0.5), (0.0, 0.0)]
    assert all(group.origin == "me" and group.round == 7 for group in result.local)
    assert around.trained == around.pooled == list(result.local)
    assert around.phases == ["draw", "generate", "score", "share", "mix", "update"]
    assert result.reward_local == pytest.approx(1 / 3)
    assert result.informative_fraction == pytest.approx(2 / 3)
    assert result.tokens_generated == 3 * 2 * 2
    assert (result.external, result.reward_external) == ((), None), "alone in the swarm it trains on what there is"


async def test_groups_of_others_join_the_update_and_nothing_else() -> None:
    around = Surroundings()
    around.receive("a", "a", "a", "b", "c")
    result = await around.sapo().round(7)
    assert around.trained == [*result.local, *result.external]
    assert len(result.external) == 4
    assert sum(group.origin == "a" for group in result.external) <= 2
    assert around.pooled == list(result.local)
    assert around.asked == [(7 - 20, 1)]
    assert around.settled == [({group.group.task.ref.index for group in result.external}, set(), 7)]
    assert result.reward_local == pytest.approx(1 / 3), "rewards of others do not count"
    assert result.reward_external == 0.5


async def test_what_does_not_fit_the_model_is_refused_and_others_take_its_place() -> None:
    around = Surroundings()
    around.receive(*"abcdefgh")
    around.too_long = {0, 1, 2, 3, 4}
    result = await around.sapo().round(1)
    assert {group.group.task.ref.index for group in result.external} == {5, 6, 7}
    assert around.settled == [({5, 6, 7}, around.too_long, 1)]


async def test_a_pool_full_of_what_does_not_fit_ends_the_search() -> None:
    around = Surroundings()
    around.receive(*(f"peer {number}" for number in range(100)))
    around.too_long = set(range(100))
    result = await around.sapo().round(1)
    assert result.external == ()
    assert result.stats is not None
    assert len(around.checked) == 4 * MAX_CHOICES


async def test_of_a_chosen_group_the_selected_part_is_trained_on_and_the_whole_is_told() -> None:
    around = Surroundings()
    around.selection = Positives()
    around.receive(*"abc")
    result = await around.sapo().round(7)
    assert sorted(result.external, key=lambda group: group.origin) == list(around.others.values())
    assert result.reward_external == 0.5, "the rewards of whole groups, failures too"
    parts = around.trained[len(result.local) :]
    assert [[one.text for one in part.group.completions] for part in parts] == [["1"]] * 3
    assert [part.advantages for part in parts] == [(0.5,)] * 3, "as in the whole group"
    assert around.trained[: len(result.local)] == list(result.local), "its own groups stay whole"
    assert around.checked == parts, "what has to fit the model is what it is to learn"


async def test_what_the_gate_refused_does_not_come_again() -> None:
    around = Surroundings()
    around.receive(*"abcd")
    around.unlikely = {1, 3}
    sapo = around.sapo()
    result = await sapo.round(1)
    assert len(result.external) == 4
    assert around.settled == [({0, 1, 2, 3}, set(), 1), (set(), {1, 3}, 1)]
    assert result.first_used == {"a": 1, "c": 1}, "what was refused was not trained on"
    again = await sapo.round(2)
    assert {group.group.task.ref.index for group in again.external} == {0, 2}
    assert around.settled[2:] == [({0, 2}, set(), 2)]


async def test_a_group_is_first_used_once() -> None:
    around = Surroundings()
    around.receive(*"aabc")
    around.used_before = {1, 2}
    result = await around.sapo(reuse=2).round(1)
    assert result.first_used == {"a": 1, "c": 1}
    around.diverges = True
    assert (await around.sapo(reuse=2).round(2)).first_used == {}, "a step that failed used nothing"


async def test_a_node_that_does_not_train_samples_scores_and_shares() -> None:
    around = Surroundings()
    around.receive(*"abcd")
    result = await around.sapo(train=False).round(7)
    assert around.pooled == list(result.local)
    assert around.shared == [(list(result.local), 7)]
    assert around.phases == ["draw", "generate", "score", "share"]
    assert (result.external, result.stats, result.problem, result.first_used) == ((), None, "", {})
    assert (around.trained, around.asked, around.settled) == ([], [], [])


async def test_a_step_that_failed_refuses_nothing() -> None:
    around = Surroundings()
    around.receive(*"abcd")
    around.unlikely, around.diverges = {1, 3}, True
    await around.sapo().round(1)
    assert around.settled == [({0, 1, 2, 3}, set(), 1)]


async def test_own_groups_that_teach_nothing_leave_room_for_others() -> None:
    around = Surroundings()
    around.selection = Fill()
    around.receive(*"abcdefgh")
    result = await around.sapo().round(1)
    assert sum(group.informative for group in result.local) == 2
    assert len(result.external) == 5, "I + J is 7"


async def test_it_shares_what_it_was_told_to_and_trains_on_all() -> None:
    around = Surroundings()
    result = await around.sapo(share="informative").round(7)
    assert around.shared == [([group for group in result.local if group.informative], 7)]
    assert result.batches_sent == 2
    assert around.trained == list(result.local)


async def test_without_places_for_others_nobody_is_asked() -> None:
    around = Surroundings()
    around.receive("a", "b")
    result = await around.sapo(external=0).round(1)
    assert result.external == ()
    assert not around.asked
    assert not around.settled


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
    for around in (first, again, other):
        around.receive(*"abcdefgh")
    results = [await around.sapo(share=0.5).round(4) for around in (first, again)]
    await other.sapo().round(5)
    assert results[0].external == results[1].external
    assert first.shared == again.shared
    assert first.seeds == again.seeds
    assert not set(first.seeds) & set(other.seeds)


def test_seeds_fit_a_signed_integer_and_differ_by_purpose() -> None:
    seeds = {round_seed(seed, number, purpose) for seed in (0, 2**63 - 1) for number in range(50) for purpose in "ab"}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_tasks_of_the_next_round_are_drawn_ahead_and_a_round_tells_where_its_own_end() -> None:
    around = Surroundings()
    sapo = around.sapo()
    results = [await sapo.round(number, another=number < 3) for number in (1, 2, 3)]
    assert [result.cursor for result in results] == [{"position": 3 * number} for number in (1, 2, 3)]
    assert around.drawn == 9, "none for a round that does not follow"
    refs = [scored.group.task.ref.index for result in results for scored in result.local]
    assert refs == list(range(3, 12)), "each once, in order"
    assert around.phases.count("draw") == 1
    assert around.story == ["sample 1", "update 1", "sample 2", "update 2", "sample 3", "update 3"]


async def test_overlapping_rounds_are_sampled_one_update_early_and_are_otherwise_the_same() -> None:
    plain, around = Surroundings(), Surroundings()
    one, other = plain.sapo(), around.sapo(overlap=True)
    expected = [await one.round(number, another=number < 3) for number in (1, 2, 3)]
    results = [await other.round(number, another=number < 3) for number in (1, 2, 3)]
    assert around.story == ["sample 1", "sample 2", "update 1", "sample 3", "update 2", "update 3"]
    assert sorted(around.seeds) == sorted(plain.seeds)
    assert [result.local for result in results] == [result.local for result in expected]
    assert [result.cursor for result in results] == [result.cursor for result in expected]
    assert around.trained == plain.trained
    assert around.shared == plain.shared
    assert [result.seconds_generate == SECONDS_AHEAD for result in results] == [False, True, True]


async def test_the_next_round_is_sampled_while_this_one_waits_for_its_verifiers() -> None:
    around = Surroundings()
    around.scoring = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: around.sapo(overlap=True).round(1, another=True))
        await trio.testing.wait_all_tasks_blocked()
        assert around.story == ["sample 1", "sample 2"]
        around.scoring.set()
    assert around.story == ["sample 1", "sample 2", "update 1"]
    await around.sapo(overlap=True).round(1)
    assert around.story[3:] == ["sample 4", "update 1"], "a round that none follows begins no other"


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_cancelled_round_has_made_no_update_and_begun_nothing_that_goes_on(overlap: bool) -> None:
    around = Surroundings()
    around.scoring = trio.Event()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: around.sapo(overlap=overlap).round(1, another=True))
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert (around.trained, around.pooled) == ([], [])


async def test_sampling_ahead_that_fails_ends_the_round_before_its_update() -> None:
    around = Surroundings()
    around.breaks_at = 2
    with pytest.raises(EngineBroken):
        await around.sapo(overlap=True).round(1, another=True)
    assert around.story == ["sample 1", "sample 2"]
    assert around.trained == []
