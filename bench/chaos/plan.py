"""Which fault comes when, from a seed."""

import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "learner", "stop", "partition", "slow", "full", "read-only", "clock"]

WEIGHTS: dict[Kind, int] = {
    "kill": 3,
    "learner": 1,
    "stop": 2,
    "partition": 2,
    "slow": 2,
    "full": 2,
    "read-only": 1,
    "clock": 1,
}
"""How often each kind comes, beside the others."""

SECONDS: dict[Kind, tuple[float, float]] = {
    # Until it is started again.
    "kill": (1, 8),
    "learner": (0, 0),
    "stop": (2, 20),
    "partition": (10, 40),
    "slow": (15, 45),
    "full": (10, 30),
    "read-only": (10, 30),
    "clock": (15, 60),
}
"""How long a fault lasts, from and to."""

_TOUCHES: dict[Kind, str] = {
    "kill": "process",
    "learner": "process",
    "stop": "process",
    "partition": "swarm",
    "slow": "link",
    "full": "disk",
    "read-only": "disk",
    "clock": "clock",
}
"""What a fault is done to. Two of the same thing do not overlap, any others may: a node with a full disk is killed."""

SECONDS_A_FAULT_AND_NODE = 80.0
"""Mean time between two faults of one node. A killed one needs twenty seconds of a busy machine to load."""

_REST = 5.0
"""Seconds of peace between two faults of the same thing."""

CLOCK_SECONDS = 3600.0
"""By how much a clock is wrong."""


@dataclass(frozen=True, slots=True)
class Fault:
    """From `at` on (seconds of the run) for `seconds`. `nodes` are those hit; of a partition, one of its sides."""

    at: float
    seconds: float
    kind: Kind
    nodes: tuple[int, ...]
    amount: float = 0.0
    """Of a clock: seconds ahead."""

    @property
    def end(self) -> float:
        """When it is healed."""
        return self.at + self.seconds


def draw(seed: int, nodes: int, seconds: float, kinds: Collection[Kind]) -> list[Fault]:
    """The faults of a run of nodes 1 to `nodes`, in order; all of them are over after `seconds`.

    Each kind comes before any comes again more often than its weight, so a short run meets all of them.
    """
    choice = random.Random(seed)
    # Often enough in a short run, too, for each kind to come.
    gap = min(SECONDS_A_FAULT_AND_NODE / nodes, seconds / (3 * len(kinds)))
    busy: dict[tuple[str, int], float] = {}
    found: list[Fault] = []
    deck: list[Kind] = []
    at = 0.0
    while True:
        at += choice.expovariate(1.0) * gap
        if at >= seconds:
            return found
        if not deck:
            deck = _deck(choice, kinds)
        kind = deck.pop()
        fault = _fault(choice, at, kind, nodes, seconds, busy)
        if fault is not None:
            found.append(fault)
        else:
            deck.insert(0, kind)


def _deck(choice: random.Random, kinds: Collection[Kind]) -> list[Kind]:
    """One of each kind on top, the rest of the weights below."""
    first = [kind for kind in WEIGHTS if kind in kinds]
    rest = [kind for kind in first for _ in range(WEIGHTS[kind] - 1)]
    choice.shuffle(first)
    choice.shuffle(rest)
    return rest + first


def _fault(
    choice: random.Random, at: float, kind: Kind, nodes: int, seconds: float, busy: dict[tuple[str, int], float]
) -> Fault | None:
    """None if there is no node left to hit, or no time."""
    low, high = SECONDS[kind]
    length = min(choice.uniform(low, high), max(low, seconds / 6))
    if kind == "partition":
        side = choice.sample(range(1, nodes + 1), choice.randint(1, max(1, nodes // 2)))
        hit, things = tuple(sorted(side)), [(_TOUCHES[kind], 0)]
    else:
        free = [node for node in range(1, nodes + 1) if busy.get((_TOUCHES[kind], node), 0.0) <= at]
        if not free:
            return None
        hit = (choice.choice(free),)
        things = [(_TOUCHES[kind], hit[0])]
    if at + length > seconds or any(busy.get(thing, 0.0) > at for thing in things):
        return None
    busy.update(dict.fromkeys(things, at + length + _REST))
    return Fault(at, length, kind, hit, choice.choice((-1, 1)) * CLOCK_SECONDS if kind == "clock" else 0.0)
