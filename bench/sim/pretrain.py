"""Supervised pretraining of stacked policies, and a store of policies once made."""

import hashlib
import json
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.sim.adam import StackedAdam
from bench.sim.stack import Shape, StackedPolicy
from rl.batches import Group, Row

Lessons = Callable[[random.Random, int], Sequence[tuple[Sequence[int], Sequence[int]]]]
"""Draws so many lessons: the token ids of a prompt and those of the answer to it, EOS included."""

CACHE = Path("~/.cache/swarmnode/bench")
BETAS = (0.9, 0.98)
WARMUP = 0.05
"""Share of the steps in which the learning rate rises."""


def pretrain(shape: Shape, lessons: Lessons, steps: int, batch: int, lr: float, seed: int) -> StackedPolicy:
    """One policy, from nothing: `steps` steps of `batch` lessons at a learning rate of at most `lr`."""
    policy = StackedPolicy.random(shape, seed)
    specialise(policy, [lessons], steps, batch, lr, [seed])
    return policy


def specialise(
    policy: StackedPolicy, lessons: Sequence[Lessons], steps: int, batch: int, lr: float, seeds: Sequence[int]
) -> list[float]:
    """Train every node in place on lessons of its own, with a warm-up and a cosine to zero.

    Returns each node's mean loss, nats an answer token, over the last tenth of the steps.
    """
    optimizer = StackedAdam(policy, lr, BETAS)
    randoms = [random.Random(seed) for seed in seeds]
    losses: list[torch.Tensor] = []
    for step in range(steps):
        drawn = [_groups(draw(rng, batch)) for draw, rng in zip(lessons, randoms, strict=True)]
        scores = policy.scores(drawn)
        tokens = torch.bincount(scores.node, minlength=policy.nodes)
        loss = -torch.zeros(policy.nodes).index_add(0, scores.node, scores.logprobs) / tokens
        # Each node's own weights see its own loss only, so the sum trains each as if alone.
        loss.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.lr = lr * schedule(step, steps)
        optimizer.step()
        losses.append(loss.detach())
    last = losses[-max(1, steps // 10) :]
    mean: list[float] = torch.stack(last).mean(0).tolist()
    return mean


def schedule(step: int, steps: int) -> float:
    """The share of the full learning rate in step 0, 1, ... of `steps`."""
    rising = min(1.0, (step + 1) / max(1, round(WARMUP * steps)))
    return rising * 0.5 * (1 + math.cos(math.pi * step / steps))


def _groups(drawn: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Group]:
    """Answers to one prompt together, so that its pass is shared."""
    answers: dict[tuple[int, ...], list[Row]] = {}
    for prompt, answer in drawn:
        answers.setdefault(tuple(prompt), []).append(Row(tuple(answer), 0.0))
    return [Group(prompt, tuple(rows)) for prompt, rows in answers.items()]


def cached(key: str, make: Callable[[], StackedPolicy], directory: Path = CACHE) -> StackedPolicy:
    """What `make` returned when it was first called for this key.

    The key names what tells policies of one version of the bench apart: after a change to tasks or to how policies are
    taught, take another directory.
    """
    folder = directory.expanduser()
    file = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.safetensors"
    if file.exists():
        with safe_open(file, "pt") as stored:
            shape = Shape(**json.loads(stored.metadata()["shape"]))
            return StackedPolicy(shape, {name: stored.get_tensor(name) for name in shape.sizes()})
    policy = make()
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")
    weights = {name: weight.detach() for name, weight in policy.weights.items()}
    save_file(weights, unfinished, {"key": key, "shape": json.dumps(asdict(policy.shape))})
    unfinished.replace(file)
    return policy
