"""The likelihood gate: an update is what it would be had the refused completions never come."""

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.batches import Group, Row
from rl.errors import CheckpointError, TrainingError
from rl.gate import LEAST, MARGIN, SPAN, WINDOW, Gate, likelihood
from rl.learner import Learner
from rl.models import resolve
from rl.policy import Policy
from rl.ranks import Following
from rl.rollouts import Completion, RolloutGroup, Sampling, ScoredGroup, UpdateStats
from rl.settings import LearnerSettings
from tests.rl.learning import UNCLIPPED, MakeLearner, assert_close, same, scored, state_of, warm
from verifiers.base import Task, TaskRef

GATE = Gate([-7.5 / MARGIN + 0.1 * (number % 20) for number in range(2 * LEAST)])
"""Of a policy that says what it says with -4.3 to -2.4 nats a token, so that the threshold is -7.5."""

Plan = list[tuple[int, float]]


def unlikely(policy: Policy, prompt: Sequence[int], length: int) -> tuple[int, ...]:
    """At each place the token that the policy is least likely to say."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(length):
            ids.append(int(policy.model(input_ids=torch.tensor([ids])).logits[0, -1, :258].argmin()))
    return tuple(ids[len(prompt) :])


def likely(policy: Policy, prompt: Sequence[int], length: int, seed: int) -> tuple[int, ...]:
    """Nearly the most likely tokens: another seed, other ones."""
    ids = list(prompt)
    with torch.no_grad():
        for place in range(length):
            best = policy.model(input_ids=torch.tensor([ids])).logits[0, -1, :258].topk(3).indices
            ids.append(int(best[(seed + place) % 3]))
    return tuple(ids[len(prompt) :])


def written(policy: Policy, start: int, *rows: tuple[str, int, float]) -> Group:
    """A group of rows, each "own", "good" or "junk" with its length and advantage; all but "own" come from others."""
    prompt = tuple(range(start, start + 7))

    def row(number: int, kind: str, length: int, advantage: float) -> Row:
        tokens = unlikely(policy, prompt, length) if kind == "junk" else likely(policy, prompt, length, start + number)
        return Row(tokens, advantage, external=kind != "own")

    return Group(prompt, tuple(row(number, *given) for number, given in enumerate(rows)))


def given_and_kept(policy: Policy) -> tuple[list[Group], list[Group], list[int]]:
    """Groups, what the gate leaves of them, and the places of those of which it refuses something."""
    groups = [
        written(policy, 10, ("own", 6, 1.0), ("own", 9, -1.0), ("own", 3, -0.5)),
        # One of the right answers is junk, and one of the wrong ones, which nobody asks.
        written(policy, 30, ("good", 5, 1.0), ("junk", 7, 1.5), ("junk", 4, -1.0), ("good", 8, -1.0)),
        # All right answers are junk; the wrong ones are longer, and so come first where each is a batch of its own.
        written(policy, 50, ("junk", 4, 2.0), ("good", 9, -1.0), ("junk", 5, 1.0), ("good", 11, -1.0)),
        written(policy, 70, ("junk", 6, 1.0)),
        written(policy, 90, ("own", 6, 0.0), ("own", 4, 0.0)),
        written(policy, 110, ("good", 3, 1.0), ("good", 12, -0.3)),
        # An own one is never refused, whatever it says.
        replace(
            (junk := written(policy, 130, ("junk", 5, 1.0))), rows=tuple(replace(r, external=False) for r in junk.rows)
        ),
    ]
    first, mixed, _, _, *rest = groups
    kept = [first, Group(mixed.prompt, (mixed.rows[0], *mixed.rows[2:])), *rest]
    return groups, kept, [1, 2, 3]


def assert_alike(one: Policy, other: Policy) -> None:
    for mine, theirs in zip(one.weights.masters, other.weights.masters, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=2e-6)


def assert_same_stats(one: UpdateStats, other: UpdateStats) -> None:
    for name in ("loss", "clip_fraction", "entropy", "grad_norm", "kl"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-4, abs=1e-6), name
    assert (one.policy_step, one.tokens_trained) == (other.policy_step, other.tokens_trained)


def both(make_learner: MakeLearner, **training: Any) -> tuple[Policy, Policy]:
    one, other = (warm(make_learner(training={"lr": 1e-3, **training})).policy for _ in range(2))
    return one, other


SEVERAL = {"epochs": 2, "minibatches": 2}


@pytest.mark.parametrize(
    "training",
    [
        *({"loss": loss, **further} for loss in ("dapo", "grpo", "dr_grpo") for further in ({}, SEVERAL)),
        {"loss": "grpo", "token_budget": 1},
        {"token_budget": 40, "kl": 0.1},
        {"token_budget": 40, "kl": 0.1, **SEVERAL},
    ],
    ids=lambda training: "-".join(map(str, training.values())),
)
def test_refused_rows_might_as_well_never_have_come(make_learner: MakeLearner, training: dict[str, Any]) -> None:
    gated, plain = both(make_learner, **training)
    groups, kept, places = given_and_kept(plain)
    stats, expected = gated.update(groups, 3, gate=GATE), plain.update(kept, 3)
    assert (stats.refused, stats.refused_completions) == (tuple(places), 4)
    assert_same_stats(stats, expected)
    assert_alike(gated, plain)


def test_the_gradient_is_that_of_the_rows_that_are_left(make_learner: MakeLearner) -> None:
    """Adam hides a wrong scale of the whole gradient in its first steps, so the gradient itself is compared."""
    gated, plain = both(make_learner, **UNCLIPPED)
    found: list[dict[str, torch.Tensor]] = []
    groups, kept, _ = given_and_kept(plain)
    for policy, given, gate in ((gated, groups, GATE), (plain, kept, None)):
        weights = policy.weights

        def keep(optimizer: Any, args: Any, kwargs: Any, weights: Any = weights) -> None:
            found.append({n: m.grad.clone() for n, m in zip(weights.names, weights.masters, strict=True)})

        policy.optimizer.register_step_pre_hook(keep)
        policy.update(given, 0, gate=gate)
    assert_close(found[1], found[0], 1e-5)


def test_it_takes_no_pass_of_its_own(make_learner: MakeLearner) -> None:
    policy, _ = both(make_learner)
    groups, _, _ = given_and_kept(policy)
    passes: list[int] = []
    policy.model.get_decoder().register_forward_pre_hook(lambda *_: passes.append(1))
    counts = []
    for gate in (GATE, None):
        passes.clear()
        policy.update(groups, 0, gate=gate)
        counts.append(len(passes))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("place", [0, 20, 40])
def test_a_little_junk_in_a_long_likely_answer_is_refused(make_learner: MakeLearner, place: int) -> None:
    policy = warm(make_learner(training={"lr": 1e-3})).policy
    prompt = tuple(range(30, 37))
    before = likely(policy, prompt, place, 0)
    junk = unlikely(policy, [*prompt, *before], SPAN)
    after = likely(policy, [*prompt, *before, *junk], 40 - place, 0)
    padded, clean = (*before, *junk, *after), likely(policy, prompt, 40 + SPAN, 1)
    group = Group(prompt, tuple(Row(tokens, 1.0, external=True) for tokens in (padded, clean)))
    values = policy.logprobs([group])
    assert float(values[group.rows[0]].mean()) > GATE.threshold, "the mean over all of it says nothing"
    assert policy.update([group], 0, gate=GATE).refused_completions == 1


@pytest.mark.parametrize("further", [{}, {"token_budget": 1}, {"minibatches": 2}])
def test_nothing_left_is_no_step(make_learner: MakeLearner, further: dict[str, Any]) -> None:
    policy, _ = both(make_learner, **further)
    groups = given_and_kept(policy)[0][2:5]
    before = [master.detach().clone() for master in policy.weights.masters]
    stats = policy.update(groups, 0, gate=GATE)
    assert (stats.tokens_trained, stats.policy_step, stats.grad_norm) == (0, 0, 0.0)
    assert (stats.refused, stats.refused_completions) == ((0, 1), 3)
    for master, value in zip(policy.weights.masters, before, strict=True):
        assert torch.equal(master, value)
        assert master.grad is None


@pytest.mark.parametrize("steps", [1, 2])
def test_ranks_refuse_together(make_learner: MakeLearner, model_dir: Path, tmp_path: Path, steps: int) -> None:
    """A group's right answers are judged in one rank and its wrong ones counted in another."""
    training = {"lr": 1e-3, "token_budget": 1, "minibatches": steps, "gate": False}
    given = LearnerSettings.model_validate({
        "model": {"name": str(model_dir), "device": "cpu", "dtype": "float32"},
        "lora": {"rank": 4},
        "sampling": {"max_new_tokens": 8},
        "training": {**training, "ranks": 2},
    })  # fmt: skip
    ends = Pipe()
    ranks = [Following(end, rank, 2, "cpu", 1, 20.0) for rank, end in enumerate(ends)]
    policies = [Policy(resolve(given.model), given, one) for one in ranks]
    plain = warm(make_learner(training=training)).policy
    for policy in policies:
        policy.weights.restore(plain.weights.snapshot())
    groups, kept, places = given_and_kept(plain)
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.connect(tmp_path / "meeting"), ranks))
        found = list(pool.map(lambda policy: policy.update(groups, 0, gate=GATE), policies))
    torch.set_num_threads(threads)
    expected = plain.update(kept, 0)
    for policy, stats in zip(policies, found, strict=True):
        assert (stats.refused, stats.refused_completions) == (tuple(places), 4)
        assert_same_stats(stats, expected)
        assert_alike(policy, plain)
    for end in ends:
        end.close()


# As a node has it


def own_groups(learner: Learner, tasks: list[Task], seed: int = 1) -> list[ScoredGroup]:
    groups = learner.generate(tasks, Sampling(8, 8), seed)
    return [scored(group, [1.0, 0.0] * 4) for group in groups]


def peers(task: Task, *answers: tuple[str, float]) -> ScoredGroup:
    completions = tuple(Completion(text, True) for text, _ in answers)
    return scored(RolloutGroup(task, completions, 3), [reward for _, reward in answers], "peer")


def tiny() -> Learner:
    sections = {
        "model": {"name": "tiny", "device": "cpu"},
        "sampling": {"max_new_tokens": 12},
        "engine": {"kind": "transformers"},
        "training": {"lr": 1e-3},
    }
    return Learner(LearnerSettings.model_validate(sections))


def sums(count: int) -> list[Task]:
    return [Task(TaskRef("t", "1", "{}", 0, i), "chain_sum", f"Calculate {i} + 2.", None) for i in range(count)]


def says(learner: Learner, scored: ScoredGroup) -> float:
    """The mean log-prob of the first completion's tokens."""
    group = learner._group(scored)
    return float(learner.policy.logprobs([group])[group.rows[0]].mean())


def test_an_answer_behind_junk_is_not_learned_and_an_ordinary_one_is() -> None:
    learners = {name: tiny() for name in ("junk", "alone", "plain")}
    own = own_groups(learners["alone"], sums(4))
    whole = peers(sums(6)[4], ("Result: 6", 1.0))
    # As selection leaves it: what was right, with its advantage over what was wrong.
    ordinary = replace(whole, advantages=(1.0,))
    poison = peers(sums(6)[5], ("#@!~ zq^^ xx %% 7", 1.0), ("I think 9", 0.0))
    tokens, norms = {}, {}
    for name, others in {"junk": [poison], "alone": [], "plain": [ordinary, poison]}.items():
        # The group without any gradient counts in what the gate knows and not in the places.
        dead = replace(own[0], rewards=(0.0,) * 8, advantages=(0.0,) * 8)
        [*_, stats] = [learners[name].update([dead, *own[1:], *others], seed) for seed in range(3)]
        tokens[name], norms[name] = stats.tokens_trained, stats.grad_norm
        assert stats.refused == {"junk": (4,), "alone": (), "plain": (5,)}[name]
        assert stats.refused_completions == len(stats.refused)
        assert stats.gate is not None
        assert -20 < stats.gate < -2
    said = {name: [says(learner, group) for group in (ordinary, poison)] for name, learner in learners.items()}
    assert said["junk"] == pytest.approx(said["alone"], abs=1e-3)
    # What the ordinary answer taught is more than what the own ones taught anyway.
    assert said["plain"][0] > said["alone"][0] + 0.1
    assert tokens["alone"] == tokens["junk"] < tokens["plain"]
    assert norms["junk"] == pytest.approx(norms["alone"], rel=1e-2)


def test_without_the_gate_everything_is_trained_on(make_learner: MakeLearner, tasks: list[Task]) -> None:
    junk = peers(tasks[0], ("\x00\x01\x02", 1.0), ("\x03", 0.0))
    stats = make_learner(training={"gate": False}).update([junk], 0)
    assert (stats.tokens_trained, stats.refused, stats.gate) == (6, (), None)
    # Until enough is known of what the policy says itself, nothing of others passes.
    stats = make_learner(training={"gate": True}).update([junk], 0)
    assert (stats.tokens_trained, stats.refused, stats.gate) == (0, (0,), math.inf)


def test_what_the_gate_knows_is_saved_and_outlives_a_failure(
    make_learner: MakeLearner, tasks: list[Task], tmp_path: Path
) -> None:
    learner, again, off = (make_learner(training={"gate": choice}) for choice in (True, True, False))
    own = own_groups(learner, tasks)
    foreign = peers(tasks[0], ("2", 1.0), ("3", 0.0))
    learner.update(own, 0)
    learner.save(tmp_path)
    again.load(tmp_path)
    off.load(tmp_path)
    bad = replace(own[0], advantages=(math.nan,) * 8)
    with pytest.raises(TrainingError):
        learner.update([*own_groups(learner, tasks, 2), bad], 1)
    stats = [one.update([*own[:1], foreign], 1) for one in (learner, again, off)]
    assert (stats[0].gate, stats[0].refused, stats[0].loss) == (stats[1].gate, stats[1].refused, stats[1].loss)
    assert same(state_of(learner), state_of(again))
    assert stats[0].gate is not None
    assert stats[2].gate is None
    # Each own completion has been seen once, by what its engine said of it.
    seen = [likelihood(c.logprobs or ()) for s in [*own, own[0]] for c in s.group.completions]
    again.save(tmp_path)
    state = json.loads((tmp_path / "policy.json").read_text())
    assert state["gate"] == pytest.approx(seen)
    # A checkpoint from before there was a gate, and a damaged one.
    del state["gate"]
    (tmp_path / "policy.json").write_text(json.dumps(state))
    again.load(tmp_path)
    assert again.update([foreign], 2).gate == math.inf
    (tmp_path / "policy.json").write_text(json.dumps({**state, "gate": ["much"]}))
    with pytest.raises(CheckpointError):
        again.load(tmp_path)


def test_a_gate_knows_the_newest_and_comes_back_as_it_was() -> None:
    gate = Gate()
    assert gate.refuses(-0.1)
    gate.observe([-100.0] * WINDOW)
    gate.observe([-2.0, -1.0] * (WINDOW // 2))
    assert len(gate.known) == WINDOW
    assert not gate.refuses(-1.0)
    assert gate.refuses(-100.0)
    assert gate.refuses(math.nan)
    assert Gate(gate.known).threshold == gate.threshold
