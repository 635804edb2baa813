"""A node's own endless, deterministic stream of tasks, drawn from its task mix."""

import bisect
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from verifiers.base import MAX_SEED, Task, TaskRef, UnknownTask, VerifierError
from verifiers.sandbox import Sandbox, SandboxError
from verifiers.settings import MixEntry

_SEARCHED = 500
"""Tasks looked at for one of the wanted split. One in ten is held out, so 500 without one mean that there is none."""

_FAILURES = 20
"""Tasks of one kind in a row that cannot be made before the kind counts as broken."""

_POSITION = "position"


def seed_of(identity: bytes) -> int:
    """The stream seed of a node, from its identity: two nodes draw different tasks, a restarted node the same."""
    digest = hashlib.sha256(b"swarmnode task stream\0" + identity).digest()
    return int.from_bytes(digest[:8], "big") & MAX_SEED


HELD_OUT_SEED = seed_of(b"held out")
"""Seed of the held-out stream. One for all, so that every node evaluates on the same tasks."""


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: str
    verifier: str
    version: str
    config: str


class TaskStream:
    """Tasks without end: the kind is drawn by weight, then the next task of that kind.

    `draw` gives the tasks of one split only. Where it stands is `cursor`, a few integers; a stream with the same mix
    and seed that was restored to it goes on with the same tasks. `skipped` counts the tasks that `draw` passed over
    since the stream was opened because they could not be made.
    """

    def __init__(
        self, sandbox: Sandbox, entries: Sequence[_Entry], weights: Sequence[float], seed: int, held_out: bool
    ):
        self._sandbox = sandbox
        self._entries = entries
        self._weights = weights
        self._bounds = list(itertools.accumulate(weights))
        self._seed = seed
        self._held_out = held_out
        self._position = 0
        self._next = [0] * len(entries)
        self.skipped = 0

    @classmethod
    async def open(cls, sandbox: Sandbox, mix: Sequence[MixEntry], seed: int, held_out: bool = False) -> "TaskStream":
        """Check every entry of the mix by making a task of it.

        Raises UnknownTask or VerifierError with the entry's number, SandboxError if there can be no workers.
        """
        if not mix:
            raise VerifierError("the task mix is empty: add a [[tasks.mix]] entry")
        found = []
        for number, entry in enumerate(mix, 1):
            try:
                version, config = await sandbox.canonical(entry.verifier, entry.config)
                kind = await _kind(sandbox, TaskRef(entry.verifier, version, config, seed, 0))
            except SandboxError:
                raise
            except VerifierError as error:
                kept = UnknownTask if isinstance(error, UnknownTask) else VerifierError
                raise kept(f"[[tasks.mix]] entry {number}: {error}") from error
            found.append(_Entry(kind, entry.verifier, version, config))
        return cls(sandbox, _told_apart(found), [entry.weight for entry in mix], seed, held_out)

    def with_seed(self, seed: int) -> "TaskStream":
        """The tasks of another stream of the same mix, from its beginning."""
        return TaskStream(self._sandbox, self._entries, self._weights, seed, self._held_out)

    @property
    def kinds(self) -> list[str]:
        """The kind of each entry of the mix, in order, all different."""
        return [entry.kind for entry in self._entries]

    @property
    def cursor(self) -> dict[str, int]:
        """Where the stream stands: draws so far, and for each kind the index of the next task to look at."""
        return {_POSITION: self._position} | dict(zip(self.kinds, self._next, strict=True))

    def makes(self, ref: TaskRef) -> bool:
        """Whether this mix makes tasks such as `ref`: of that verifier, version and configuration."""
        return any((e.verifier, e.version, e.config) == (ref.verifier, ref.version, ref.config) for e in self._entries)

    def restore(self, cursor: Mapping[str, int]) -> None:
        """Go to where a stream was. Kinds that the cursor does not know, because the mix was changed, start anew."""
        self._position = cursor.get(_POSITION, 0)
        self._next = [cursor.get(kind, 0) for kind in self.kinds]

    async def draw(self, count: int) -> list[Task]:
        """The next `count` tasks. A cancelled or failed call leaves the stream where it was."""
        position, following, skipped = self._position, list(self._next), 0
        tasks = []
        for _ in range(count):
            number = self._kind_at(position)
            task, following[number], failures = await self._search(number, following[number], _SEARCHED)
            tasks.append(task)
            skipped += failures
            position += 1
        self._position, self._next = position, following
        self.skipped += skipped
        return tasks

    async def draw_distinct(self, kind: int, count: int) -> list[Task]:
        """Up to `count` tasks of the kind with that number, all with different prompts, from the stream's beginning.

        The same call gives the same tasks wherever the stream stands, which is what an evaluation needs. Fewer come
        back where the data set has fewer questions.
        """
        tasks: dict[str, Task] = {}
        index = 0
        limit = _SEARCHED + 4 * 10 * count
        while len(tasks) < count and index < limit:
            try:
                task, index, _ = await self._search(kind, index, limit - index)
            except NothingFound:
                break
            tasks.setdefault(task.prompt, task)
        return list(tasks.values())

    async def _search(self, number: int, index: int, limit: int) -> tuple[Task, int, int]:
        """The first task of the wanted split from `index` on, the index after it, and how many could not be made."""
        entry = self._entries[number]
        failures = in_a_row = 0
        for candidate in range(index, index + limit):
            ref = TaskRef(entry.verifier, entry.version, entry.config, self._seed, candidate)
            try:
                task = await self._sandbox.make(ref)
            except SandboxError:
                raise
            except VerifierError:
                # Some data sets fail, or take too long, on a few of their seeds.
                failures += 1
                in_a_row += 1
                if in_a_row == _FAILURES:
                    raise
                continue
            in_a_row = 0
            if task.held_out == self._held_out:
                return replace(task, kind=entry.kind), candidate + 1, failures
        split = "held-out" if self._held_out else "training"
        raise NothingFound(
            f"no {split} question of {entry.kind} among {limit}: this configuration makes too few different questions; "
            "widen its options"
        )

    def _kind_at(self, position: int) -> int:
        """The kind drawn at a position: a hash of seed and position, so that no generator has to be kept."""
        digest = hashlib.sha256(f"{self._seed}:{position}".encode()).digest()
        share = int.from_bytes(digest[:8], "big") / 2**64
        return min(bisect.bisect(self._bounds, share * self._bounds[-1]), len(self._bounds) - 1)


class NothingFound(VerifierError):
    """A kind has no question of the wanted split."""


async def _kind(sandbox: Sandbox, first: TaskRef) -> str:
    """The kind of the tasks from `first` on, as one of them says that can be made. Raises what `Sandbox.make` does."""
    for index in range(_FAILURES - 1):
        try:
            return (await sandbox.make(replace(first, index=index))).kind
        except (SandboxError, UnknownTask):
            raise
        except VerifierError:
            continue
    return (await sandbox.make(replace(first, index=_FAILURES - 1))).kind


def _told_apart(entries: Sequence[_Entry]) -> list[_Entry]:
    """Entries of one kind get their options into the name: `base_conversion(max_base=4)`."""
    kinds = [entry.kind for entry in entries]
    named = []
    for entry in entries:
        if kinds.count(entry.kind) > 1:
            named.append(replace(entry, kind=f"{entry.kind}({_options(entry)})"))
        else:
            named.append(entry)
    names = [entry.kind for entry in named]
    for name in names:
        if names.count(name) > 1 or name == _POSITION:
            raise VerifierError(f"the task mix has {name} twice: keep one entry and add up the weights")
    return named


def _options(entry: _Entry) -> str:
    options = json.loads(entry.config)
    return ", ".join(f"{key}={value}" for key, value in options.items() if key not in ("dataset", "name")) or "default"
