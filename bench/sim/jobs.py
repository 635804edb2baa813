"""Runs of the simulation: one process each, kept on disk, so that what was interrupted goes on where it was."""

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import trio

from bench.sim.plan import HeldOut, History, Plan, mean
from bench.sim.regimes import REGIMES, policies
from bench.sim.tasks import Codec, Kind, load_kinds, write_files
from bench.sim.world import Swarm
from bench.tiny_vocab import build_tokenizer
from verifiers.launch import end_with_parent

FORMAT = 3
"""Of what is kept. Raise it when a run would come out differently: what was kept before is not used then."""


@dataclass(frozen=True)
class Job:
    """One run: a regime, the seed its first policies were made with, and what the nodes do."""

    regime: str
    pretrained: int
    plan: Plan
    nodes: int = 8
    held_out_every: int = 0

    @property
    def key(self) -> str:
        """Names the run in files."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Outcome:
    """What came of a run. Rewards are the nodes' own rollouts' alone; lists have an entry a tick.

    `cumulative` is the sum over ticks of the mean over (honest) nodes of each node's newest reward; `worst` the same of
    the node that has least of it, `final` the mean of the last tenth, and `poisoned` the share of completions with
    poison in them there. `generated` counts groups, `informative`, `external` and `tokens` are those of a node's update
    on average. Of `judged` completions of others the gates `refused` some. `held_out` maps a tick to the mean over
    nodes.
    """

    reward: list[float]
    entropy: list[float]
    poisoned: float
    held_out: dict[int, HeldOut]
    cumulative: float
    worst: float
    final: float
    generated: int
    informative: float
    external: float
    tokens: float
    refused: int
    judged: int
    threshold: float | None
    seconds: float

    @property
    def last_held_out(self) -> HeldOut | None:
        """As it was in the end, if it was measured."""
        return self.held_out[max(self.held_out)] if self.held_out else None


def run(job: Job, directory: Path) -> Outcome:
    """Run a job in this process, unless its outcome is kept in `directory` already."""
    path = directory / "runs" / f"{job.key}.json"
    if path.exists():
        return _read(path)
    torch.set_num_threads(1)
    regime = REGIMES[job.regime]
    kinds, codec, files = _world(directory)
    parts = policies(regime, job.pretrained, kinds, codec, directory / "policies", job.nodes)
    begun = time.monotonic()
    swarm = Swarm(job.plan, parts, codec, files)
    history = trio.run(swarm.run, job.held_out_every)
    outcome = _outcome(history, time.monotonic() - begun)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({"job": asdict(job), "outcome": asdict(outcome)}), encoding="utf-8")
    temporary.replace(path)
    return outcome


def _read(path: Path) -> Outcome:
    kept = json.loads(path.read_text(encoding="utf-8"))["outcome"]
    kept["held_out"] = {int(tick): HeldOut(**found) for tick, found in kept["held_out"].items()}
    return Outcome(**kept)


@cache
def _world(directory: Path) -> tuple[Sequence[Kind], Codec, Sequence[Path]]:
    kinds = load_kinds()
    return kinds, Codec(build_tokenizer()), write_files(kinds, directory / "tasks")


def _outcome(history: History, seconds: float) -> Outcome:
    nodes = [_carried(list(rewards)) for rewards in zip(*history.per_node, strict=True)]
    reward = [mean(tick) for tick in zip(*nodes, strict=True)]
    last = max(1, len(reward) // 10)
    threshold = history.threshold[-1] if history.threshold else float("inf")
    return Outcome(
        reward=reward,
        entropy=history.entropy,
        poisoned=mean(history.poisoned[-last:]),
        held_out={
            tick: HeldOut(mean([each.accuracy for each in found]), mean([each.solved for each in found]))
            for tick, found in history.held_out.items()
        },
        cumulative=sum(reward),
        worst=min(sum(rewards) for rewards in nodes),
        final=mean(reward[-last:]),
        generated=history.generated,
        informative=mean(history.informative),
        external=mean(history.external),
        tokens=mean(history.tokens),
        refused=history.refused,
        judged=history.judged,
        threshold=threshold if abs(threshold) < float("inf") else None,
        seconds=seconds,
    )


def _carried(rewards: list[float | None]) -> list[float]:
    """A node's newest reward at each tick; 0 before its first."""
    newest = 0.0
    return [newest := newest if reward is None else reward for reward in rewards]


def run_all(
    jobs: Iterable[Job], directory: Path, workers: int, tell: Callable[[int, int, Job, Outcome], None]
) -> dict[Job, Outcome]:
    """Run the jobs, `workers` at a time. `tell` gets how many of how many are done, and the one just done."""
    wanted = list(dict.fromkeys(jobs))
    outcomes: dict[Job, Outcome] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=end_with_parent) as pool:
        try:
            for stacks in _in_turns({(j.regime, j.pretrained, j.nodes) for j in wanted if not _kept(j, directory)}):
                for made in [pool.submit(_prepare, *stack, directory) for stack in stacks]:
                    made.result()
            running = {pool.submit(run, job, directory): job for job in wanted}
            for future in as_completed(running):
                job = running[future]
                outcomes[job] = future.result()
                tell(len(outcomes), len(wanted), job, outcomes[job])
        except BaseException:
            # Else all that is queued would be run before this is heard of.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return outcomes


Stack = tuple[str, int, int]
"""Regime, seed and number of nodes."""


def _in_turns(stacks: Iterable[Stack]) -> list[list[Stack]]:
    """First one for each base policy, then the others, which find theirs made: two at once would make it twice."""
    firsts: dict[tuple[int, float, tuple[int, ...], int], Stack] = {}
    later: list[Stack] = []
    for stack in sorted(stacks):
        regime = REGIMES[stack[0]]
        key = (regime.steps, regime.everywhere, regime.widths, stack[1])
        if firsts.setdefault(key, stack) is not stack:
            later.append(stack)
    return [list(firsts.values()), later]


def _kept(job: Job, directory: Path) -> bool:
    return (directory / "runs" / f"{job.key}.json").exists()


def _prepare(regime: str, pretrained: int, nodes: int, directory: Path) -> None:
    torch.set_num_threads(1)
    kinds, codec, _ = _world(directory)
    policies(REGIMES[regime], pretrained, kinds, codec, directory / "policies", nodes)
