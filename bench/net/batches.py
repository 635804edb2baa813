"""Batches of a wanted size: real tasks with answers of real English text, sealed as the product seals them."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.wire import MAX_ENVELOPE, Envelope, seal_round
from rl.rollouts import Completion, RolloutGroup, ScoredGroup
from verifiers.base import Task, TaskRef
from verifiers.sandbox import Sandbox

SWARM = "bench"
DATASETS = ("chain_sum", "basic_arithmetic", "base_conversion", "caesar_cipher", "spell_backward", "gcd")
_TEXT = " ".join("\n".join(topics[name] for name in sorted(topics)).split())
_FIRST_SEED = 1
_REWARDS = (1.0, 0.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a batch: so many groups of so many completions of so many characters."""

    name: str
    groups: int
    completions: int
    characters: int


async def load_verifiers(sandbox: Sandbox) -> list[tuple[str, str]]:
    """Version and configuration of each kind of task, once the sandbox has imported what makes them, as that of a node
    that samples has."""
    await sandbox.ready()
    return [await sandbox.canonical("reasoning_gym", {"dataset": name}) for name in DATASETS]


async def make_tasks(sandbox: Sandbox, count: int) -> list[Task]:
    """`count` training tasks of several kinds of ReasoningGYM."""
    kinds = await load_verifiers(sandbox)
    found: list[Task] = []
    index = 0
    while len(found) < count:
        version, config = kinds[index % len(kinds)]
        task = await sandbox.make(TaskRef("reasoning_gym", version, config, _FIRST_SEED, index))
        if not task.held_out:
            found.append(task)
        index += 1
    return found


class Maker:
    """Makes a node's batches, of which no two hold the same group."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks = tasks
        self._rng = random.Random(seed)

    def groups(self, shape: Shape, number: int) -> list[ScoredGroup]:
        """The groups of batch `number`, which is also the step of the policy that they tell. Half of the answers are
        right, each after some sentences, as those of a model that thinks aloud."""
        return [self._group(shape, number) for _ in range(shape.groups)]

    def _group(self, shape: Shape, number: int) -> ScoredGroup:
        task = self._rng.choice(self._tasks)
        answers = []
        for place in range(shape.completions):
            start = self._rng.randrange(len(_TEXT) - shape.characters)
            said = task.answer if place % 2 == 0 else "no"
            answers.append(Completion(f"{_TEXT[start : start + shape.characters]} <answer>{said}</answer>", True))
        rewards = tuple(_REWARDS[place % 2] for place in range(shape.completions))
        signs = tuple(2 * reward - 1 for reward in rewards)
        return ScoredGroup(RolloutGroup(task, tuple(answers), number), "own", number, rewards, signs)


def sealed(key: Ed25519PrivateKey, groups: Sequence[ScoredGroup], number: int) -> Envelope:
    """One batch as it travels. Raises ValueError if it does not fit into one envelope."""
    parts = seal_round(key, SWARM, number, "model", [scored.group for scored in groups], lambda: number, time.time())
    if len(parts) != 1 or len(parts[0].batch.groups) != len(groups):
        raise ValueError("the batch does not fit into one envelope")
    return parts[0]


def key_of(number: int) -> Ed25519PrivateKey:
    """The identity of node `number`, the same in each run."""
    return Ed25519PrivateKey.from_private_bytes(bytes(31) + bytes([number + 1]))


def origin_of(data: bytes) -> bytes:
    """The public key in an envelope."""
    return data[4:36]


def name_of(data: bytes) -> bytes:
    """What tells an envelope from all others: the end of its signature."""
    return data[-8:]


def fitted(tasks: Sequence[Task], name: str, size: int) -> Shape:
    """The shape whose envelopes are about `size` bytes, a little less where the protocol takes no more: one group of
    two answers for a small one, else eight of eight, of as much text as it takes."""
    size = min(size, MAX_ENVELOPE * 15 // 16)
    groups, completions = (1, 2) if size < 4096 else (8, 8)
    low, high = 1, 2**14
    maker, key = Maker(tasks, 0), key_of(0)
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        shape = Shape(name, groups, completions, middle)
        try:
            large = len(sealed(key, maker.groups(shape, 1), 1).data) > size
        except ValueError:
            large = True
        low, high = (low, middle) if large else (middle, high)
    return Shape(name, groups, completions, low)
