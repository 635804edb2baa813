"""Several processes that share a learning step, as they are: real processes on a real, small model."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch

from rl.batches import Group, plan, share_out, size
from rl.errors import CheckpointError, ModelError, OutOfMemory, RankLost, Stopped, TrainingError
from rl.leader import Leading
from rl.learner import Learner
from rl.models import resolve
from rl.policy import Policy
from rl.ranks import BUCKET, Following, together
from rl.rollouts import UpdateStats
from rl.settings import LearnerSettings
from tests.rl.learning import make_groups, same, state_of, warm

R = TypeVar("R", bound=Following)

SECONDS = 20.0
"""A deadline for what takes a moment, on a machine that has other things to do."""


def settings(model_dir: Path, ranks: int, **training: Any) -> LearnerSettings:
    return LearnerSettings.model_validate(
        {
            "model": {"name": str(model_dir), "device": "cpu", "dtype": "float32"},
            "lora": {"rank": 4},
            "sampling": {"max_new_tokens": 8},
            "engine": {"kind": "transformers"},
            "training": {"lr": 1e-3, "ranks": ranks, **training},
        }
    )


@pytest.fixture(scope="module")
def pair(model_dir: Path) -> Iterator[Learner]:
    """A learner of two ranks."""
    learner = Learner(settings(model_dir, 2))
    yield learner
    learner.close()


@pytest.fixture(scope="module")
def start(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which every weight has a gradient."""
    directory = tmp_path_factory.mktemp("start")
    warm(Learner(settings(model_dir, 1))).save(directory)
    return directory


def follower(learner: Learner) -> psutil.Process:
    assert isinstance(learner.policy.ranks, Leading)
    [pid] = learner.policy.ranks.pids
    return psutil.Process(pid)


def train(learner: Learner, updates: list[list[Group]]) -> list[UpdateStats]:
    return [learner.policy.update(groups, seed) for seed, groups in enumerate(updates)]


def assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, value in one.items():
        assert torch.allclose(value, other[name], rtol=1e-5, atol=1e-5), name


def assert_same_stats(one: UpdateStats, other: UpdateStats) -> None:
    for name in ("loss", "clip_fraction", "entropy", "grad_norm", "kl"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-4, abs=1e-6), name
    assert (one.policy_step, one.tokens_trained) == (other.policy_step, other.tokens_trained)
    assert (one.engine_logprob_gap or 0.0) == pytest.approx(other.engine_logprob_gap or 0.0, rel=1e-4)


def sampled(groups: list[Group]) -> list[Group]:
    """With log-probs as an engine reports them, so that there is a gap to count."""
    return [replace(g, rows=tuple(replace(r, sampled=(-1.0,) * len(r.tokens)) for r in g.rows)) for g in groups]


@pytest.mark.slow
def test_two_ranks_make_the_update_of_one(model_dir: Path, pair: Learner, start: Path) -> None:
    one = Learner(settings(model_dir, 1))
    updates = [make_groups(0), sampled(make_groups(1)), make_groups(2)[:1]]
    for learner in (one, pair):
        learner.load(start)
    expected, found = train(one, updates), train(pair, updates)
    assert_alike(state_of(one), state_of(pair))
    for stats, other in zip(expected, found, strict=True):
        assert_same_stats(stats, other)
    seen: list[tuple[int, int]] = []
    pair.policy.update(make_groups(), 0, progress=lambda done, total, unit: seen.append((done, total)))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1]
    assert pair.policy.update([], 0).tokens_trained == 0
    # Both ranks went back to the start, or their weights would be found to differ.
    pair.load(start)
    one.load(start)
    assert same(state_of(one), state_of(pair))
    pair.policy.update(make_groups()[3:], 0)


@pytest.mark.slow
def test_a_row_alone_is_one_rank_s_work(model_dir: Path, pair: Learner, start: Path) -> None:
    group = make_groups()[0]
    updates = [[Group(group.prompt, group.rows[:1])]]
    one = Learner(settings(model_dir, 1))
    for learner in (one, pair):
        learner.load(start)
    [expected], [found] = train(one, updates), train(pair, updates)
    assert_alike(state_of(one), state_of(pair))
    assert_same_stats(expected, found)


@pytest.mark.slow
def test_what_goes_wrong_changes_nothing_in_any_rank(pair: Learner, start: Path, tmp_path: Path) -> None:
    pair.load(start)
    before = state_of(pair)

    def unchanged() -> None:
        assert same(state_of(pair), before)

    bad = [replace(g, rows=tuple(replace(r, advantage=math.nan) for r in g.rows)) for g in make_groups()[:1]]
    with pytest.raises(TrainingError, match="loss is nan"):
        pair.policy.update([*make_groups()[1:], *bad], 0)
    unchanged()
    with pytest.raises(Stopped):
        pair.policy.update(make_groups(), 0, stop=lambda: True)
    unchanged()
    with pytest.raises(CheckpointError):
        pair.load(tmp_path)
    unchanged()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    # In rank 0 alone: the other halves its batches with it, and gives up with it.
    handle = pair.policy.model.get_decoder().register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(OutOfMemory, match="single completion"):
        pair.policy.update(make_groups(), 0)
    handle.remove()
    unchanged()
    # All ranks still agree, weight by weight.
    assert pair.policy.update(make_groups(), 0).policy_step == pair.policy.step
    assert not same(state_of(pair), before)


@pytest.mark.slow
def test_a_follower_that_is_killed_ends_the_update(pair: Learner) -> None:
    process = follower(pair)

    def kill_once(done: int, total: int, unit: str) -> None:
        # Told again before the end is noticed, when it may be gone for good.
        with suppress(psutil.NoSuchProcess):
            process.kill()

    begun = time.monotonic()
    with pytest.raises(RankLost):
        pair.policy.update(make_groups(), 0, progress=kill_once)
    with pytest.raises(RankLost):
        pair.policy.update(make_groups(), 0)
    assert time.monotonic() - begun < SECONDS
    pair.close()
    assert not process.is_running()


PARENT = """
import sys
from pathlib import Path
from rl.learner import Learner
from rl.settings import LearnerSettings
from tests.rl.learning import make_groups
learner = Learner(LearnerSettings.model_validate_json(sys.argv[1]))
learner.load(Path(sys.argv[2]))
for seed in range(3):
    learner.policy.update(make_groups(seed), seed)
learner.save(Path(sys.argv[3]))
print(*learner.policy.ranks.pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_several_steps_an_update_and_the_end_of_rank_0(model_dir: Path, start: Path, tmp_path: Path) -> None:
    several = {"epochs": 2, "minibatches": 2, "kl": 0.1, "token_budget": 60}
    given = settings(model_dir, 2, **several).model_dump_json()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PARENT, given, str(start), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as parent:
        one = Learner(settings(model_dir, 1, **several))
        one.load(start)
        train(one, [make_groups(seed) for seed in range(3)])
        assert parent.stdout is not None
        other = psutil.Process(int(parent.stdout.readline()))
        assert os.getpgid(other.pid) == os.getpgid(parent.pid)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while other.is_running() and other.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "a follower was left"
        time.sleep(0.05)
    two = Learner(settings(model_dir, 1))
    two.load(tmp_path)
    assert_alike(state_of(one), state_of(two))


def test_more_gpus_than_there_are(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    asked = settings(model_dir, 2)
    with pytest.raises(ModelError, match="1 GPUs"):
        Learner(asked.model_copy(update={"model": asked.model.model_copy(update={"device": "cuda"})}))


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("budget", [30, 100, 8192])
def test_shares_are_even_and_whole(ranks: int, budget: int) -> None:
    groups = [group for seed in range(3) for group in make_groups(seed)]
    shares = share_out(groups, budget, ranks)
    parts = [part for share in shares for batch in share for part in batch]
    assert sorted(id(row) for part in parts for row in part.rows) == sorted(id(r) for g in groups for r in g.rows)
    assert all(size(batch) <= max(budget, 60) for share in shares for batch in share)
    loads = [sum(map(size, share)) for share in shares]
    whole = sum(map(size, plan(groups, budget)))
    assert max(loads) * ranks <= 1.5 * whole


def each(ranks: Sequence[R], work: Callable[[R], Any]) -> list[Any]:
    """What `work` gives or raises in each of these ranks, which are threads here."""

    def run(one: R) -> Any:
        try:
            return work(one)
        except (MemoryError, Stopped, TrainingError, RankLost) as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks))


def test_ranks_agree_on_the_gravest(tmp_path: Path) -> None:
    ranks = [Following(Pipe()[0], rank, 3, "cpu", 1, SECONDS) for rank in range(3)]
    each(ranks, lambda one: one.connect(tmp_path / "meeting"))
    assert each(ranks, lambda one: one.gather("x" * one.rank)) == [["", "x", "xx"]] * 3
    # Larger than a bucket, of several buckets, and empty.
    sizes = (BUCKET + 5, BUCKET // 2 - 1, BUCKET // 2, 7, 0)
    tensors = [[torch.full((size,), float(10**one.rank)) for size in sizes] for one in ranks]
    each(ranks, lambda one: one.sum(tensors[one.rank]))
    assert all(bool((tensor == 111).all()) for own in tensors for tensor in own)

    def fail(one: Following) -> str:
        if one.rank == 1:
            raise MemoryError
        if one.rank == 2:
            raise TrainingError("the loss is nan")
        return "fine"

    raised = each(ranks, lambda one: together(one, lambda: fail(one)))
    assert [(type(error), str(error)) for error in raised] == [(TrainingError, "the loss is nan")] * 3
    assert each(ranks, lambda one: together(one, lambda: one.rank)) == [0, 1, 2]
    ranks[0].begin(7)
    assert [type(error) for error in each(ranks, lambda one: one.gather(None))] == [RankLost] * 3


def test_weights_that_differ_are_noticed(model_dir: Path, tmp_path: Path) -> None:
    given = settings(model_dir, 2)
    ours, theirs = Pipe()
    ranks = [Following(end, rank, 2, "cpu", 1, SECONDS) for rank, end in enumerate((ours, theirs))]
    policies = [Policy(resolve(given.model), given, one) for one in ranks]
    each(ranks, lambda one: one.connect(tmp_path / "meeting"))
    with torch.no_grad():
        policies[1].weights.masters[0].view(-1)[0] += 1e-6
    raised = each(ranks, lambda one: policies[one.rank].update(make_groups(), 0))
    assert [type(error) for error in raised] == [RankLost] * 2
    assert "different weights" in str(raised[0])
    ours.close()
    theirs.close()
