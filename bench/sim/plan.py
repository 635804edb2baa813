"""What a simulated swarm is to do, and what came of it."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Plan:
    """One run. What has no explanation here means what it means in the product's configuration.

    `group_sizes` repeat over the nodes. `informative` trains a round on at most so many of its own informative groups
    and drops the rest (0: no limit), which with a large `local` is refilling dead groups by brute force. `replay` gives
    a node its own groups back as if they were others'. `own_task` has each node meet its own kind alone.

    `delay` rounds pass before a group arrives; with `delay_up_to` the delay of each is drawn from 0 to that. `loss` is
    the chance that a group is lost on its way to one receiver. Node n takes part in every `speeds[n]`-th tick (the
    speeds repeat). `reset_every` ticks one node in turn starts over from its first policy. The last `hostile` nodes
    send what `attack` says (see `bench.sim.attacks`), to verifiers that skip junk if they are `lenient`, to nodes that
    believe what is claimed of rewards if they are `trusting`.
    """

    local: int = 4
    external: int = 4
    selection: str = "uniform"
    half_life: float = 0.0
    per_peer: int = 2
    max_age: int = 20
    reuse: int = 1
    lr: float = 4e-4
    decay_after: int = 0
    epochs: int = 1
    gate: bool = True
    rounds: int = 100
    seed: int = 0
    group_sizes: tuple[int, ...] = (8,)
    temperature: float = 1.0
    informative: int = 0
    replay: bool = False
    own_task: bool = False
    delay: int = 0
    delay_up_to: int = 0
    loss: float = 0.0
    speeds: tuple[int, ...] = (1,)
    reset_every: int = 0
    hostile: int = 0
    attack: str = "junk"
    lenient: bool = False
    trusting: bool = False


@dataclass(frozen=True)
class HeldOut:
    """What comes of `samples` completions of each of some prompts that nobody trains on, from 0 to 1.

    `accuracy` is the share of right completions; `solved` that of prompts with a right one among them (pass@k), which
    falls when a policy loses the variety that it would need to find what it does not know yet.
    """

    accuracy: float
    solved: float


@dataclass
class History:
    """What came of a run, a list entry a tick: means over the honest nodes that took part.

    `per_node` holds each honest node's reward a tick (None where it did not take part), `held_out` maps a tick to what
    each of them was measured at.
    """

    reward: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    poisoned: list[float] = field(default_factory=list)
    informative: list[float] = field(default_factory=list)
    external: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    generated: int = 0
    refused: int = 0
    judged: int = 0
    offered: int = 0
    threshold: list[float] = field(default_factory=list)
    per_node: list[list[float | None]] = field(default_factory=list)
    held_out: dict[int, list[HeldOut]] = field(default_factory=dict)


def mean(values: Sequence[float]) -> float:
    """The mean, or 0 of nothing."""
    return math.fsum(values) / len(values) if values else 0.0


def digest(*parts: object) -> int:
    """A seed from what names it, below 2**63."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
