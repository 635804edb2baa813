"""The desk: hands out tasks, scores answers, makes groups of them, keeps and sends these.

A group is the distinct answers that one task got. Whoever trains on it learns from what sets its answers apart, so one
whose rewards are all equal teaches nothing and is not sent. Where all answers are right, an empty one is put beside
them, scored by the same verifiers: not to answer is what the others are better than.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn, Protocol

import trio

from node.contributing.answers import answer_of
from node.contributing.kept import MAX_KEPT, Kept
from node.disk import Disk, DiskFullError
from rl.advantage import advantages
from rl.protocols import Scorer
from rl.rollouts import MAX_GROUP, Completion, RolloutGroup, ScoredGroup
from verifiers.base import Task
from verifiers.sandbox import RIGHT

PREFIX = "contribute:"
"""Of the origin of such groups in this node's own pool, before the name of who answered. No peer id looks like it."""

_BATCH = 16
"""Groups sent at once."""

_WAIT_SECONDS = 0.5


class Tasks(Protocol):
    """Where tasks come from: a `verifiers.stream.TaskStream`."""

    @property
    def cursor(self) -> Mapping[str, int]:
        """Where the next ones begin."""
        ...

    async def draw(self, count: int, /) -> list[Task]:
        """The next tasks. Raises VerifierError if there are none."""
        ...


class Network(Protocol):
    """What sends groups: a `p2p.swarm.Swarm`."""

    async def deliver(self, groups: Sequence[ScoredGroup], number: int, /) -> None:
        """Send these groups once somebody is there to hear them, and return when they have gone out."""
        ...


class Pool(Protocol):
    """This node's pool."""

    async def add(self, groups: Sequence[ScoredGroup]) -> None:
        """Keep these groups."""
        ...


@dataclass
class Question:
    """A task and what it was answered: reward, and whether the answer came to its end, by text."""

    task: Task
    answers: dict[str, tuple[float, bool]] = field(default_factory=dict)
    done: bool = False

    @property
    def solved(self) -> bool:
        """Whether one of the answers is right."""
        return any(reward >= RIGHT for reward, _ in self.answers.values())


class Desk:
    """`name` is who answers, `samples` (L) the most answers that a task gets, `longest` the characters of each.

    `round` is the number under which this node keeps what comes of it.
    """

    def __init__(
        self,
        name: str,
        stream: Tasks,
        scorer: Scorer,
        pool: Pool,
        kept: Kept,
        disk: Disk,
        *,
        samples: int,
        longest: int,
        advantage: Literal["group", "mean"] = "group",
        round: Callable[[], int],  # noqa: A002  # this node's current round
    ) -> None:
        self._origin = PREFIX + name
        self._stream = stream
        self._scorer = scorer
        self._pool = pool
        self._kept = kept
        self._disk = disk
        self._advantage = advantage
        self._round = round
        self._more = trio.Event()
        self.samples = min(samples, MAX_GROUP - 1)
        self.longest = longest
        self.made = 0
        """Groups made since the start."""
        self.sent = 0
        """Groups sent since the start, also such as were made before it."""

    @property
    def waiting(self) -> int:
        """Groups that have not been sent."""
        return len(self._kept)

    @property
    def full(self) -> bool:
        """Whether so many groups wait that no more are made."""
        return self.waiting >= MAX_KEPT

    async def room(self) -> None:
        """Returns when there is room for a further group."""
        while self.full:
            await trio.sleep(_WAIT_SECONDS)

    async def draw(self) -> Question:
        """The next task, never one of the held-out split. Raises VerifierError if there is none."""
        (task,) = await self._stream.draw(1)
        return Question(task)

    async def answer(self, question: Question, data: bytes | str, finished: bool = True) -> float:
        """The reward of an answer, in [0, 1]; one that was given before costs nothing.

        `finished` is False if it was cut at a limit. Raises NoAnswer if it is none, VerifierError.
        """
        text = answer_of(data, self.longest)
        if text not in question.answers:
            (reward,) = await self._scorer.score(question.task, [text])
            if len(question.answers) < self.samples:
                question.answers[text] = (reward, finished)
            return reward
        return question.answers[text][0]

    async def finish(self, question: Question) -> bool:
        """Done with this task: whether a group came of it, which is kept and will be sent.

        Raises VerifierError, or DiskFullError if told to stop while the disk is full.
        """
        if question.done:
            return False
        question.done = True
        group = await self._group(question)
        cursor = self._stream.cursor

        async def write() -> None:
            self._kept.add(group, cursor)

        await self._disk.write("the answers", write)
        if group is None:
            return False
        await self._pool.add([group])
        self.made += 1
        self._more.set()
        return True

    async def _group(self, question: Question) -> ScoredGroup | None:
        """None if it would teach nothing."""
        answers = dict(question.answers)
        rewards = {reward for reward, _ in answers.values()}
        if len(rewards) == 1 and max(rewards) > 0:
            (reward,) = await self._scorer.score(question.task, [""])
            answers[""] = (reward, True)
            rewards.add(reward)
        if len(rewards) < 2:
            return None
        completions = tuple(Completion(text, finished) for text, (_, finished) in answers.items())
        scores = tuple(reward for reward, _ in answers.values())
        return ScoredGroup(
            RolloutGroup(question.task, completions, 0),
            self._origin,
            self._round(),
            scores,
            advantages(scores, self._advantage),
        )

    async def send(self, network: Network) -> NoReturn:
        """Send what is kept, the oldest first, for ever. What a stop interrupts is sent again by the next start:
        receivers take it once.
        """
        while True:
            groups = self._kept.first(_BATCH)
            if groups:
                await network.deliver(list(groups.values()), self._round())
                await self._forget(groups)
                self.sent += len(groups)
            else:
                self._more = trio.Event()
                await self._more.wait()

    async def _forget(self, keys: Collection[int]) -> None:
        async def write() -> None:
            self._kept.remove(keys)

        try:
            await self._disk.write("what was sent", write)
        except DiskFullError:
            # The node is told to stop, and ends this.
            await trio.sleep_forever()
