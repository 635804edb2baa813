"""What a batch costs a node, measured on this machine with the product's own functions, and how many bytes it has."""

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from reasoning_gym.data import read_data_file

from p2p.host.messages import Author, Message, ihave_frame, parse, publish_frame
from p2p.wire import Envelope, open_envelope, seal_round
from rl.advantage import advantages
from rl.pool import SqlitePool
from rl.rollouts import Completion, RolloutGroup, ScoredGroup
from verifiers.base import Task
from verifiers.sandbox import Sandbox, open_sandbox
from verifiers.settings import MixEntry, VerifierSettings
from verifiers.stream import TaskStream

GROUPS, SIZE, CHARACTERS = 4, 8, 800
"""A round's own groups and completions of one, by the product's defaults, and the characters of a completion: about 200
tokens."""

MIX = [
    MixEntry(config={"dataset": name})
    for name in ("chain_sum", "base_conversion", "calendar_arithmetic", "letter_counting")
]
_TOPIC = "/swarmnode/2/main/rollouts/100"


@dataclass(frozen=True)
class Costs:
    """Seconds of one core, and bytes.

    `sign` makes a round into an envelope and that into a gossip message; `check` is what a node does before it passes a
    batch on (protobuf, gossip signature, envelope); `make` and `score` are of one group, in the sandbox; `store` puts a
    batch's groups into the pool. `message` are the bytes of a batch as a gossip frame, of which the `envelope` is most;
    `text` those of its completions as they are. `offer` and `offer_id` are those of an IHAVE and of each id in it.
    """

    sign: float
    check: float
    make: float
    score: float
    store: float
    envelope: int
    message: int
    text: int
    offer: int
    offer_id: int
    groups: int = GROUPS

    @property
    def admit(self) -> float:
        """Seconds from taking a batch to having its groups in the pool."""
        return self.groups * (self.make + self.score) + self.store


def read_costs(path: Path) -> Costs:
    """Costs that another run has written. Raises ValueError for a file that is none."""
    try:
        return Costs(**json.loads(path.read_text("utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no costs of bench.scale --write-costs: {error}") from error


def write_costs(costs: Costs, path: Path) -> None:
    """Keep them for other runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(costs), indent=2) + "\n", encoding="utf-8")


def measure(batches: int = 24) -> Costs:
    """Measure with so many batches. Takes half a minute at most, for the start of the sandbox."""
    return trio.run(_measure, batches)


async def _measure(batches: int) -> Costs:
    writer = Writer(random.Random("costs"))
    async with open_sandbox(VerifierSettings(workers=1), ()) as sandbox:
        await sandbox.ready()
        stream = await TaskStream.open(sandbox, MIX, seed=1)
        rounds = [[writer.group(task) for task in await stream.draw(GROUPS)] for _ in range(batches)]
        groups = [group for batch in rounds for group in batch]
        # Once before: what a worker imports first is no part of it.
        await sandbox.score(groups[0].task, [completion.text for completion in groups[0].completions])
        make, score = await _verified(sandbox, groups)
    author, key = Author(writer.key), iter(range(10**6))
    sealed: list[Envelope] = []
    frames: list[bytes] = []

    def sign(batch: Sequence[RolloutGroup]) -> None:
        [envelope] = seal_round(writer.key, "main", 1, "model", batch, lambda: next(key), time.time())
        sealed.append(envelope)
        frames.append(publish_frame(author.message(_TOPIC, envelope.data)))

    signed = _median(sign, rounds)
    checked = _median(_check, frames)
    with TemporaryDirectory() as directory, SqlitePool(Path(directory) / "pool.sqlite", "own") as pool:
        stored = _median(pool.add, [[_scored(group) for group in batch] for batch in rounds])
    one, two = (len(ihave_frame(_TOPIC, [bytes(46)] * count)) for count in (1, 2))
    return Costs(
        signed,
        checked,
        make,
        score,
        stored,
        round(statistics.fmean(len(envelope.data) for envelope in sealed)),
        round(statistics.fmean(map(len, frames))),
        round(statistics.fmean(_text(batch) for batch in rounds)),
        2 * one - two,
        two - one,
    )


class Writer:
    """Makes completions: pieces of a novel that ReasoningGYM brings along, so that they compress as prose does."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._novel = " ".join(read_data_file("in_the_year_2889.txt").split())
        self.key = Ed25519PrivateKey.from_private_bytes(b"\x01" * 32)

    def group(self, task: Task, size: int = SIZE, characters: int = CHARACTERS) -> RolloutGroup:
        """A task with `size` completions, the last of them right."""
        starts = [self._rng.randrange(len(self._novel) - characters) for _ in range(size)]
        texts = [self._novel[start : start + characters] for start in starts]
        texts[-1] = f"{texts[-1]} <answer>{task.answer}</answer>"
        return RolloutGroup(task, tuple(Completion(text, True) for text in texts), 1)


def _check(frame: bytes) -> None:
    rest = frame
    while rest[0] & 0x80:
        rest = rest[1:]
    [raw] = parse(rest[1:]).publish
    message = Message.of(raw)
    message.verify()
    open_envelope(message.data)


async def _verified(sandbox: Sandbox, groups: Sequence[RolloutGroup]) -> tuple[float, float]:
    """Median seconds of making the task of a group, and of scoring its answers."""
    made, scored = [], []
    for group in groups:
        began = time.perf_counter()
        task = await sandbox.make(group.task.ref)
        made.append(time.perf_counter() - began)
        began = time.perf_counter()
        await sandbox.score(task, [completion.text for completion in group.completions])
        scored.append(time.perf_counter() - began)
    return statistics.median(made), statistics.median(scored)


def _scored(group: RolloutGroup) -> ScoredGroup:
    rewards = (0.0,) * (len(group.completions) - 1) + (1.0,)
    return ScoredGroup(group, "other", 1, rewards, tuple(advantages(rewards)))


def _text(batch: Sequence[RolloutGroup]) -> int:
    return sum(len(completion.text) for group in batch for completion in group.completions)


def _median(work: Callable[[Any], object], items: Sequence[Any]) -> float:
    seconds = []
    for item in items:
        began = time.perf_counter()
        work(item)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
