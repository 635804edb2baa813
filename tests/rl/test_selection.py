"""What of others enters a round: how much of it, from whom, how old, and which part of a group."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.advantage import advantages
from rl.rollouts import Completion, RolloutGroup, ScoredGroup
from rl.selection import STRATEGIES, Candidate, Fill, FillPositives, Positives, Room, Uniform
from verifiers.base import Task, TaskRef

ROOM = Room(number=10, local=4, informative=4, external=4, per_peer=2, group_size=8)
TASK = Task(TaskRef("v", "1", "{}", 1, 0), "sum", "1 + 1?", "2")


def room(**changes: int) -> Room:
    return replace(ROOM, **changes)


def candidates(**counts: int) -> list[Candidate]:
    """So many of each origin, each of eight completions of which four are right."""
    origins = [origin for origin, count in counts.items() for _ in range(count)]
    return [Candidate(number, origin, 1, "sum", 8, 0.5, 0) for number, origin in enumerate(origins)]


def right(*counts: int, origin: str = "") -> list[Candidate]:
    """Groups of eight with so many right answers each, all of one origin or each of another."""
    return [
        Candidate(number, origin or f"peer {number}", 1, "sum", 8, count / 8, 0) for number, count in enumerate(counts)
    ]


def scored(*answers: tuple[str, float]) -> ScoredGroup:
    """A group of these texts and rewards."""
    texts, rewards = zip(*answers, strict=True)
    completions = tuple(Completion(text, True) for text in texts)
    return ScoredGroup(RolloutGroup(TASK, completions, 3), "them", 7, tuple(rewards), advantages(rewards))


def texts(group: ScoredGroup) -> list[str]:
    return [completion.text for completion in group.group.completions]


def drawn(among: Sequence[Candidate], in_room: Room, strategy: Uniform, rounds: int) -> Counter[int]:
    """How often each was chosen, over so many seeds."""
    return Counter(one.id for seed in range(rounds) for one in strategy.choose(among, in_room, Random(seed)))


def test_every_candidate_is_chosen_as_often() -> None:
    chosen = drawn(candidates(a=3, b=3, c=3), room(external=3, per_peer=3), Uniform(), 3000)
    assert sum(chosen.values()) == 9000
    assert [chosen[number] for number in range(9)] == pytest.approx([1000] * 9, rel=0.12)


def test_a_flood_of_one_origin_gets_no_more_than_its_share() -> None:
    among = candidates(flood=500, a=1, b=3)
    for seed in range(20):
        chosen = Uniform().choose(among, ROOM, Random(seed))
        assert len({one.id for one in chosen}) == 4
        assert max(Counter(one.origin for one in chosen).values()) <= 2


def test_fewer_than_asked_for_is_what_there_is() -> None:
    assert Uniform().choose([], ROOM, Random(1)) == []
    assert len(Uniform().choose(candidates(a=9), ROOM, Random(1))) == 2
    assert Uniform().choose(candidates(a=9), room(external=0), Random(1)) == []


@pytest.mark.parametrize(("informative", "taken"), [(4, 4), (1, 7), (0, 8)])
def test_fill_gives_others_the_places_of_own_groups_that_teach_nothing(informative: int, taken: int) -> None:
    among = candidates(**{f"peer_{number}": 2 for number in range(9)})
    for strategy in (Fill(), FillPositives()):
        assert len(strategy.choose(among, room(informative=informative), Random(1))) == taken
    assert len(Uniform().choose(among, room(informative=informative), Random(1))) == 4


def test_a_candidate_counts_its_right_answers() -> None:
    assert [one.successes for one in right(1, 3, 7)] == [1, 3, 7]
    tenth = sum([0.1] * 3 + [0.7]) / 4
    assert Candidate(1, "a", 1, "sum", 4, tenth, 0).successes == 1, "a sum of 1 is not rounded up to 2"
    assert Candidate(1, "a", 1, "sum", 4, 0.3, 0).successes == 2, "1.2 in partial credit has room for two"
    assert Candidate(1, "a", 1, "sum", 64, 1e-9, 0).successes == 1


def test_positives_take_as_many_right_answers_as_there_are_places_for_completions() -> None:
    rare = Positives().choose(right(*[1] * 50), ROOM, Random(1))
    assert len(rare) == 32, "J places of L completions, from as many groups"
    common = Positives().choose(right(*[7] * 50), ROOM, Random(1))
    assert len(common) == 4, "seven each, and what is left over has no room for another seven"


def test_what_does_not_fit_is_passed_over_for_what_does() -> None:
    among = right(7, 7, 7, 7, 7, 4)
    for seed in range(20):
        chosen = Positives().choose(among, ROOM, Random(seed))
        assert sum(one.successes for one in chosen) == 32, "four of seven, and the four that still fit"


def test_positives_of_one_origin_take_no_more_than_its_share_of_completions() -> None:
    flood = [replace(one, id=100 + one.id) for one in right(*[1] * 200, origin="flood")]
    chosen = Positives().choose([*flood, *right(7, 7)], ROOM, Random(1))
    assert Counter(one.origin for one in chosen) == {"flood": 16, "peer 0": 1, "peer 1": 1}


@pytest.mark.parametrize("strategy", STRATEGIES.values())
def test_old_groups_are_drawn_less_often_the_older_they_are(strategy: type[Uniform]) -> None:
    among = [replace(one, round=came) for one, came in zip(right(7, 7, 7), (10, 8, 6), strict=True)]
    one_place = room(external=1, local=4)
    chosen = drawn(among, one_place, strategy(half_life=2.0), 3000)
    assert [chosen[number] / 3000 for number in range(3)] == pytest.approx([4 / 7, 2 / 7, 1 / 7], abs=0.03)
    alike = drawn(among, one_place, strategy(half_life=0.0), 3000)
    assert [alike[number] / 3000 for number in range(3)] == pytest.approx([1 / 3] * 3, abs=0.03)


@pytest.mark.parametrize(("half_life", "age"), [(1e-3, 20), (1.0, 10**6), (5e-324, 20), (1e9, 20)])
def test_any_age_and_half_life_can_be_weighed_up(half_life: float, age: int) -> None:
    among = [replace(one, round=10**6 - number * age) for number, one in enumerate(right(7, 7, 7))]
    chosen = Uniform(half_life).choose(among, room(number=10**6), Random(1))
    assert {one.id for one in chosen} == {0, 1, 2}
    if half_life <= 1:
        assert chosen[0].id == 0, "the new one comes first by far"


@given(
    shape=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(2, 64), st.floats(0.001, 0.999)), max_size=30
    ),
    places=st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, 6), st.integers(1, 6), st.integers(2, 8)),
    name=st.sampled_from(sorted(STRATEGIES)),
    half_life=st.sampled_from([0.0, 0.5, 5.0]),
    seed=st.integers(0, 2**63 - 1),
)
def test_no_strategy_takes_more_than_there_is_room_for(
    shape: list[tuple[str, int, int, float]], places: tuple[int, int, int, int, int], name: Any, half_life: float,
    seed: int,
) -> None:  # fmt: skip
    local, informative, external, per_peer, group_size = places
    in_room = Room(9, local, min(local, informative), external, per_peer, group_size)
    among = [
        Candidate(number, origin, came, "sum", completions, reward, 0)
        for number, (origin, came, completions, reward) in enumerate(shape)
    ]
    strategy = STRATEGIES[name](half_life)
    chosen = strategy.choose(among, in_room, Random(seed))
    assert chosen == strategy.choose(among, in_room, Random(seed)), "the same seed, the same choice"
    assert len({one.id for one in chosen}) == len(chosen)
    assert set(chosen) <= set(among)
    # Completions of `positives`, groups of the others.
    cost = {one: min(one.successes, group_size) if name == "positives" else 1 for one in among}
    size = group_size if name == "positives" else 1
    limit = local + external - in_room.informative if name.startswith("fill") else external * size
    taken: Counter[str] = Counter()
    for one in chosen:
        taken[one.origin] += cost[one]
    assert taken.total() <= limit
    assert all(count <= per_peer * size for count in taken.values())
    for one in set(among) - set(chosen):
        full = taken.total() + cost[one] > limit or taken[one.origin] + cost[one] > per_peer * size
        assert full, "no room is left empty that a candidate would have filled"


@pytest.mark.parametrize("strategy", [Uniform(), Fill()])
def test_whole_groups_are_trained_on_whole(strategy: Uniform) -> None:
    group = scored(("2", 1.0), ("3", 0.0))
    assert strategy.part(group, 8) is group


@pytest.mark.parametrize("strategy", [Positives(), FillPositives()])
def test_a_part_is_each_right_answer_once_with_the_advantage_it_had_in_its_group(strategy: Uniform) -> None:
    whole = scored(("2", 1.0), ("3", 0.0), ("2", 1.0), ("two", 1.0), ("", 0.0), ("4", 0.0))
    part = strategy.part(whole, 8)
    assert texts(part) == ["2", "two"]
    assert part.rewards == (1.0, 1.0)
    assert part.advantages == (whole.advantages[0], whole.advantages[3])
    assert part.advantages[0] > 0
    assert (part.origin, part.round, part.group.task, part.group.policy_step) == ("them", 7, TASK, 3)


def test_an_answer_that_was_cut_is_another_than_the_same_text_brought_to_an_end() -> None:
    whole = scored(("2", 1.0), ("2", 1.0), ("3", 0.0))
    cut = replace(whole.group.completions[1], finished=False)
    group = replace(whole.group, completions=(whole.group.completions[0], cut, whole.group.completions[2]))
    assert [one.finished for one in Positives().part(replace(whole, group=group), 8).group.completions] == [True, False]


def test_token_ids_of_another_policy_go_and_do_not_make_an_answer_another() -> None:
    whole = scored(("2", 1.0), ("2", 1.0), ("3", 0.0))
    sampled = tuple(
        replace(one, tokens=(number, 0), logprobs=(-1.0, -0.5)) for number, one in enumerate(whole.group.completions)
    )
    part = Positives().part(replace(whole, group=replace(whole.group, completions=sampled)), 8)
    assert part.group.completions == (Completion("2", True),)


def test_of_graded_answers_the_best_are_kept_and_no_more_than_their_rewards_add_up_to() -> None:
    some = scored(("a", 0.2), ("b", 0.9), ("c", 0.6), ("d", 0.0))
    assert texts(Positives().part(some, 8)) == ["b", "c"], "1.7 in all"
    hardly_any = scored(*((str(number), 0.02 + 0.001 * number) for number in range(8)))
    assert texts(Positives().part(hardly_any, 8)) == ["7"], "eight answers that are hardly better than nothing are one"


@given(rewards=st.lists(st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.9, 1.0]) | st.floats(0, 1), min_size=2, max_size=20))
def test_what_a_part_holds_fits_what_its_candidate_counted(rewards: list[float]) -> None:
    # Texts repeat, and the same text has the same reward, as from a verifier.
    names = {reward: f"{number}" for number, reward in enumerate(dict.fromkeys(rewards))}
    whole = scored(*((names[reward], reward) for reward in rewards))
    part = Positives().part(whole, 8)
    counted = Candidate(0, "them", 7, "sum", len(rewards), whole.mean_reward, 0).successes
    assert len(part.rewards) == len(part.advantages) == len(texts(part)) <= counted
    assert len(set(texts(part))) == len(texts(part))
    assert all(advantage > 0 for advantage in part.advantages)
    assert all(first >= then for first, then in itertools.pairwise(part.rewards)), "the best first"
    bounded = [min(advantage, math.sqrt(8 - 1)) for advantage in whole.advantages]
    there = set(zip(texts(whole), whole.rewards, bounded, strict=True))
    assert set(zip(texts(part), part.rewards, part.advantages, strict=True)) <= there
    if max(whole.advantages) > 0:
        assert part.rewards[0] == max(rewards)


def test_a_right_answer_among_many_weighs_no_more_than_one_in_a_group_of_ones_own_size() -> None:
    rare = scored(("right", 1.0), *((f"wrong {number}", 0.0) for number in range(63)))
    [advantage] = Positives().part(rare, 8).advantages
    own = scored(("right", 1.0), *((f"wrong {number}", 0.0) for number in range(7)))
    assert advantage == pytest.approx(max(own.advantages), rel=1e-3)
    assert Positives().part(rare, 64).advantages[0] > 2 * advantage


@pytest.mark.parametrize("name", ["uniform", "fill", "positives"])
def test_an_origin_of_which_most_was_refused_has_room_for_one_group(name: Any) -> None:
    doubtful = [replace(one, trust=0.1) for one in candidates(bad=9)]
    among = [*doubtful, *(replace(one, id=one.id + 100) for one in candidates(good=9))]
    chosen = STRATEGIES[name]().choose(among, room(external=8, informative=4, per_peer=4), Random(1))
    origins = Counter(one.origin for one in chosen)
    assert origins["bad"] == 1
    assert origins["good"] == (8 if name == "positives" else 4)
    half = [replace(one, trust=0.5) for one in among]
    again = Counter(o.origin for o in STRATEGIES[name]().choose(half, room(external=8, per_peer=4), Random(1)))
    assert again == {"bad": origins["good"] // 2, "good": origins["good"] // 2}
    nearly = [replace(one, trust=0.99) for one in among]
    best = Counter(o.origin for o in STRATEGIES[name]().choose(nearly, room(external=8, per_peer=4), Random(1)))
    assert best == {"bad": origins["good"], "good": origins["good"]}, "a refusal now and then costs nothing"
