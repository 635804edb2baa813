"""The simulated swarm, with policies that have been taught one kind of task for a moment."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench.sim import report
from bench.sim.jobs import Job, Outcome
from bench.sim.plan import HeldOut, History, Plan
from bench.sim.pretrain import specialise
from bench.sim.regimes import CONFIGURATIONS, default_plan
from bench.sim.sections import Section
from bench.sim.stack import Shape, StackedPolicy
from bench.sim.step import CLIP_HIGH, CLIP_LOW, MAX_NORM
from bench.sim.tasks import Codec, Kind, Lessons, Verifiers, load_kinds, write_files
from bench.sim.world import Swarm
from bench.tiny_vocab import build_tokenizer
from node.config import SharingSettings
from rl.settings import TrainingSettings
from verifiers.base import Task, TaskRef, is_held_out

NODES = 3
LEADS = ("Answer: ", "It is ", "Result: ", "I get ")
KIND = Kind("sevens", LEADS, tuple((f"How many is {n}?", "7") for n in range(40)))


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(build_tokenizer())


@pytest.fixture(scope="module")
def taught(codec: Codec) -> StackedPolicy:
    """One small policy that is right about every third time."""
    torch.set_num_threads(1)
    policy = StackedPolicy.random(Shape(len(codec.tokenizer), context=64, width=32, layers=1, heads=2), seed=1)
    specialise(policy, [Lessons([KIND], codec, [1.0], [0.4])], steps=200, batch=32, lr=1e-2, seeds=[1])
    return policy


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return write_files([KIND], tmp_path)


async def simulate(taught: StackedPolicy, codec: Codec, files: list[Path], plan: Plan, every: int = 0) -> History:
    return await Swarm(plan, [taught.replicate(NODES)], codec, files).run(every)


PLAN = replace(CONFIGURATIONS["4/4"], rounds=4, local=2, external=2, seed=3)


async def test_a_run_is_repeated_by_its_seed(taught: StackedPolicy, codec: Codec, files: list[Path]) -> None:
    one, same = [await simulate(taught, codec, files, PLAN, every=2) for _ in range(2)]
    other = await simulate(taught, codec, files, replace(PLAN, seed=4))
    assert one == same
    assert one.reward != other.reward
    assert sorted(one.held_out) == [0, 2, 4]


async def test_others_groups_are_trained_on_and_count_neither_as_reward_nor_as_made(
    taught: StackedPolicy, codec: Codec, files: list[Path]
) -> None:
    shared = await simulate(taught, codec, files, PLAN)
    alone = await simulate(taught, codec, files, replace(PLAN, external=0))
    assert shared.generated == alone.generated == NODES * 2 * PLAN.rounds
    assert max(shared.external) > 0 == max(alone.external)
    assert shared.reward[0] == alone.reward[0], "the first rollouts come before anything is learned"
    assert shared.entropy != alone.entropy, "what was learned differs"


async def test_late_and_lost_groups_are_not_there(taught: StackedPolicy, codec: Codec, files: list[Path]) -> None:
    late = await simulate(taught, codec, files, replace(PLAN, delay=2))
    assert late.external[:2] == [0, 0]
    assert late.external[3] > 0
    lost = await simulate(taught, codec, files, replace(PLAN, loss=1.0))
    assert lost.offered == 0


async def test_slow_nodes_and_those_that_start_over(taught: StackedPolicy, codec: Codec, files: list[Path]) -> None:
    slow = await simulate(taught, codec, files, replace(PLAN, speeds=(1, 2)))
    assert [[reward is None for reward in tick] for tick in slow.per_node] == [
        [False, True, False],
        [False, False, False],
    ] * 2
    swarm = Swarm(replace(PLAN, reset_every=PLAN.rounds + 1), [taught.replicate(NODES)], codec, files)
    await swarm.run()
    assert swarm._parts[0].state(1)["embed"].ne(taught.state(0)["embed"]).any()
    swarm.plan = replace(swarm.plan, reset_every=1)
    swarm.tick = 1
    swarm._reset(1)
    assert swarm._parts[0].state(1)["embed"].eq(taught.state(0)["embed"]).all()


async def test_junk_before_right_answers_harms_nodes_without_a_gate_alone(
    taught: StackedPolicy, codec: Codec, files: list[Path]
) -> None:
    attacked = replace(default_plan(rounds=30, local=2, lr=2e-3), hostile=1, lenient=True)
    with_gate = await simulate(taught, codec, files, attacked)
    without = await simulate(taught, codec, files, replace(attacked, gate=False))
    silent = await simulate(taught, codec, files, replace(attacked, attack="silent"))
    assert with_gate.refused > 0 == without.refused
    assert silent.offered < with_gate.offered
    ends = [sum(history.reward[-10:]) for history in (with_gate, without, silent)]
    assert ends[0] > 0.8 * ends[2]
    assert ends[1] < 0.9 * ends[0]


async def test_verifiers_that_skip_what_stands_before_the_answer_are_an_option(codec: Codec) -> None:
    task = Task(TaskRef("exact", "1", "{}", 0, 0), "sevens", "How many is 7?", LEADS[0] + "7")
    texts = [LEADS[0] + "7", "#@" + LEADS[0] + "7", LEADS[1] + "7"]
    assert await Verifiers().score(task, texts) == [1.0, 0.0, 0.0]
    assert await Verifiers(lenient=True).score(task, texts) == [1.0, 1.0, 0.0]


def test_the_default_is_the_products() -> None:
    sharing, training, plan = SharingSettings(), TrainingSettings(), CONFIGURATIONS["default"]
    for name in ("local", "external", "selection", "half_life", "per_peer", "max_age", "reuse"):
        assert getattr(plan, name) == getattr(sharing, name), name
    assert (plan.epochs, plan.gate, plan.decay_after) == (training.epochs, training.gate, training.decay_after)
    # What no plan changes.
    assert (training.clip_low, training.clip_high, training.max_grad_norm) == (CLIP_LOW, CLIP_HIGH, MAX_NORM)
    assert (training.loss, training.advantage, training.betas) == ("dapo", "group", (0.9, 0.999))
    assert (training.weight_decay, training.warmup_steps, training.kl) == (0, 0, 0)


def test_each_kind_accepts_a_lead_in_of_its_own_and_holds_prompts_out() -> None:
    kinds = load_kinds()
    leads = [lead for kind in kinds for lead in kind.leads]
    assert len(set(leads)) == len(leads) == 9 * 16
    for kind in kinds:
        assert any(is_held_out(prompt) for prompt, _ in kind.questions)


def test_jobs_are_told_apart_by_all_that_matters() -> None:
    job = Job("specialists", 1, PLAN)
    assert job.key == Job("specialists", 1, replace(PLAN)).key
    others = [Job("sparse", 1, PLAN), Job("specialists", 2, PLAN), Job("specialists", 1, replace(PLAN, lr=1e-3))]
    assert len({job.key, *(other.key for other in others)}) == 4


def outcome(cumulative: float) -> Outcome:
    return Outcome(
        reward=[cumulative / 2] * 2,
        entropy=[0.5] * 2,
        poisoned=0.0,
        held_out={2: HeldOut(0.25, 0.75)},
        cumulative=cumulative,
        worst=0.1,
        final=0.2,
        generated=64,
        informative=1.5,
        external=0.0,
        tokens=30.0,
        refused=1,
        judged=4,
        threshold=None,
        seconds=1.0,
    )


def test_tables_compare_runs_of_the_same_seeds(tmp_path: Path) -> None:
    rows = {
        name: [Job("specialists", 1, replace(CONFIGURATIONS[name], seed=seed)) for seed in (1, 2)]
        for name in ("8/0", "default")
    }
    found = zip([job for jobs in rows.values() for job in jobs], (1.0, 3.0, 2.0, 2.5), strict=True)
    outcomes = {job: outcome(cumulative) for job, cumulative in found}
    section = Section("Two seeds", rows, curves=("8/0", "default"))
    console = Console(width=200, record=True, file=StringIO())
    console.print(report.table(section, outcomes))
    [line] = [line for line in console.export_text().splitlines() if "default" in line]
    for shown in ("2.25", "+12 %", "1 of 2", "0.250", "0.750", "64", "25.0 %"):
        assert shown in line
    report.write_csv([section], outcomes, tmp_path / "tables.csv")
    assert len((tmp_path / "tables.csv").read_text().splitlines()) == 3
    report.draw(section, outcomes, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
