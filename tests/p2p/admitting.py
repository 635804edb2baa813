"""A node's admission among small stand-ins, for tests."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

import trio
from trio.testing import wait_all_tasks_blocked

from p2p.admission import Admission
from p2p.contribution import Contribution
from p2p.reasons import Reason
from p2p.reputation import Reputation
from p2p.settings import AdmissionSettings
from p2p.transport import Verdict
from p2p.wire import Envelope, seal
from tests.p2p.fakes import Clock, FakePool, FakeTasks, numbers
from tests.p2p.forging import NOW, batch, group, key, peer
from verifiers.base import TaskRef

OWN, GOOD, BAD, OTHER = peer(100), peer(1), peer(2), peer(3)
TRAIN = numbers()(500)
"""Indices whose questions may be trained on."""


class Node:
    """An `Admission` and all it works with. `now` is the wall clock; `clock` the other one, trio's own if None."""

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        allow: Collection[str] = (),
        tasks: FakeTasks | None = None,
        own_task: Callable[[TaskRef], bool] = lambda ref: False,
        settings: AdmissionSettings | None = None,
        shards: tuple[int, list[int]] = (1, [0]),
    ) -> None:
        """`shards`: how many there are, and which are heard."""
        self.now = Clock(NOW)
        self.tasks = tasks or FakeTasks()
        self.pool = FakePool()
        self.bans: list[str] = []
        self.accepted: list[Envelope] = []
        self.said: list[str] = []
        time = clock or trio.current_time
        self.reputation = Reputation(None, self.bans.append, self.now, clock=time)
        self.contribution = Contribution(None, OWN)
        self.admission = Admission(
            settings or AdmissionSettings(),
            "main",
            OWN,
            allow,
            self.tasks,
            self.pool,
            self.reputation,
            lambda: 12,
            self.now,
            time,
            on_accepted=self.accepted.append,
            own_task=own_task,
            shards=shards[0],
            heard=shards[1],
            contribution=self.contribution,
            say=lambda level, text: self.said.append(text),
        )

    @property
    def rejected(self) -> Counter[Reason]:
        return self.admission.counts.rejected

    def send(self, data: bytes, forwarder: str = GOOD, *, requested: bool = False) -> Verdict:
        return self.admission.check(data, forwarder, requested=requested)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """With its checks running until the block ends."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.admission.run)
            yield
            nursery.cancel_scope.cancel()

    async def settle(self) -> None:
        """Check all that waits, then stop."""
        async with self.running():
            while self.admission.waiting:
                await trio.sleep(1)
            await wait_all_tasks_blocked()


def sealed(number: int, signer: int = 1, created: float = NOW) -> bytes:
    """A good batch, different for each number, of one group."""
    return seal(
        key(signer), batch(number, [group(TRAIN[number % 500], ["right", "wrong", f"{number}"])], created=created)
    ).data
