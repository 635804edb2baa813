"""What a node can make of what it hears: the product's own admission, pool and selection, in made-up time.

One node, with so many others that publish, goes through rounds. Envelopes are real; what is made up is the time that
the sandbox takes (as measured) and which answers are right.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from trio.testing import MockClock

from bench.scaling.costs import GROUPS, SIZE, Costs
from bench.scaling.real import task
from node.config import SharingSettings
from p2p.admission import Admission
from p2p.reputation import Reputation
from p2p.settings import AdmissionSettings
from p2p.wire import seal_round
from rl.pool import SqlitePool
from rl.rollouts import Completion, RolloutGroup, ScoredGroup
from rl.selection import STRATEGIES, Room
from verifiers.base import Task, TaskRef, is_held_out

INFORMATIVE = 0.5
"""Share of groups whose rewards differ; of these 1 to 7 of 8 answers are right, each number as often."""

_START = 1.8e9
_FORWARDER = "forwarder"


@dataclass(frozen=True)
class Use:
    """Of one node: `heard` others, `offered` groups a second, of which `admitted` is the share that came to the pool.

    `busy` is the part of one core's time that checking takes, `wait` and `wait_p99` seconds from a batch's coming to
    its being in the pool. Of `candidates` to choose from a round trains on `trained` groups; `used` is the share of
    groups to learn from that is ever trained on.
    """

    heard: int
    offered: float
    admitted: float
    busy: float
    wait: float
    wait_p99: float
    candidates: float
    trained: float
    used: float


class _Tasks:
    """A sandbox that takes as long as the real one and knows what is right by the answer's text."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.busy = 0.0

    async def make(self, ref: TaskRef) -> Task:
        await self._work(self._costs.make)
        return task(ref.index)

    async def score(self, of: Task, completions: Sequence[str]) -> list[float]:
        await self._work(self._costs.score)
        return [float(text.startswith("right")) for text in completions]

    async def _work(self, seconds: float) -> None:
        self.busy += seconds
        await trio.sleep(seconds)


class _Pool:
    """The real pool, and when each batch came to it."""

    def __init__(self, pool: SqlitePool, costs: Costs) -> None:
        self._pool = pool
        self._costs = costs
        self.came: dict[int, float] = {}
        self.informative = 0

    async def add(self, groups: Sequence[ScoredGroup]) -> None:
        await trio.sleep(self._costs.store)
        self._pool.add(groups)
        self.informative += sum(group.informative for group in groups)
        for group in groups:
            self.came[group.group.task.ref.index] = trio.current_time()


def use(heard: int, costs: Costs, round_seconds: float, rounds: int = 40, seed: int = 1) -> Use:
    """Hear so many others for so many rounds."""
    with TemporaryDirectory() as directory, SqlitePool(Path(directory) / "pool.sqlite", "own") as pool:
        node = _Node(pool, heard, costs, round_seconds, rounds, seed)
        trio.run(node.run, clock=MockClock(autojump_threshold=0))
        return node.seen()


class _Node:
    def __init__(
        self, pool: SqlitePool, heard: int, costs: Costs, round_seconds: float, rounds: int, seed: int
    ) -> None:
        self._store = pool
        self._heard = heard
        self._round_seconds = round_seconds
        self._rounds = rounds
        self._rng = random.Random(seed)
        self._number = 1
        self._sharing = SharingSettings()
        self._tasks, self._pool = _Tasks(costs), _Pool(pool, costs)
        self._published: dict[int, float] = {}
        self._indexes = (index for index in range(10**8) if not is_held_out(task(index).prompt))
        self._candidates: list[int] = []
        self._trained: list[int] = []
        self._ever: set[int] = set()

    async def run(self) -> None:
        """All rounds."""
        reputation = Reputation(None, lambda peer: None, _now, clock=trio.current_time, say=lambda level, text: None)
        gate = Admission(
            AdmissionSettings(), "main", "own", (), self._tasks, self._pool, reputation, lambda: self._number, _now
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gate.run)
            for number in range(self._heard):
                nursery.start_soon(self._publish, gate, number)
            for number in range(1, self._rounds + 1):
                self._number = number
                await trio.sleep(self._round_seconds)
                self._choose()
            nursery.cancel_scope.cancel()

    async def _publish(self, gate: Admission, number: int) -> None:
        key = Ed25519PrivateKey.from_private_bytes((number + 1).to_bytes(32, "big"))
        await trio.sleep(self._rng.uniform(0, self._round_seconds))
        for sequence in range(self._rounds):
            groups = [self._group() for _ in range(GROUPS)]
            for envelope in seal_round(key, "main", sequence, "model", groups, lambda at=sequence: at + 1, _now()):  # type: ignore[misc]
                self._published |= dict.fromkeys([group.task.ref.index for group in groups], trio.current_time())
                gate.check(envelope.data, _FORWARDER)
            await trio.sleep(self._round_seconds * self._rng.uniform(0.9, 1.1))

    def _group(self) -> RolloutGroup:
        index = next(self._indexes)
        right = self._rng.randint(1, SIZE - 1) if self._rng.random() < INFORMATIVE else 0
        texts = [f"{'right' if place < right else 'wrong'} {index} {place}" for place in range(SIZE)]
        return RolloutGroup(task(index), tuple(Completion(text, True) for text in texts), 1)

    def _choose(self) -> None:
        """What the product does at the end of a round."""
        sharing = self._sharing
        found = self._store.candidates(self._number - sharing.max_age, sharing.reuse)
        room = Room(self._number, sharing.local, 0, sharing.external, sharing.per_peer, SIZE)
        chosen = STRATEGIES[sharing.selection](sharing.half_life).choose(found, room, self._rng)
        self._store.settle([one.id for one in chosen], (), self._number)
        self._candidates.append(len(found))
        self._trained.append(len(chosen))
        self._ever.update(one.id for one in chosen)

    def seen(self) -> Use:
        """Figures over the second half of the rounds where they need a full pool."""
        lasted, half = self._rounds * self._round_seconds, self._rounds // 2
        came = self._pool.came
        waits = [came[index] - when for index, when in self._published.items() if index in came]
        later = sum(self._trained[half:]) / max(sum(self._trained), 1) * len(self._ever)
        return Use(
            self._heard,
            len(self._published) / lasted,
            len(came) / max(len(self._published), 1),
            self._tasks.busy / lasted,
            float(np.mean(waits)),
            float(np.percentile(waits, 99)),
            float(np.mean(self._candidates[half:])),
            float(np.mean(self._trained[half:])),
            later / max(self._pool.informative * (self._rounds - half) / self._rounds, 1e-9),
        )


def _now() -> float:
    return _START + trio.current_time()
