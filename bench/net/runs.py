"""Runs of several nodes, each a process of its own: as fast as it goes, or at a steady rate."""

import multiprocessing
import time
from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import psutil
import trio

from bench.net.batches import key_of, name_of, origin_of
from bench.net.nodes import Batch, Node, Open

PATIENCE = 10.0
"""Seconds without any arrival after which what is missing counts as lost."""

JUMPS = 1, 2, 3
"""Node i dials those that come so much later, around a ring: six neighbours for each, which is gossipsub's degree."""

MESH_LOW = 4
"""Neighbours with whom a node exchanges messages at once, before it starts: gossipsub is content with these."""

_START_SECONDS = 60.0
_SETTLE_SECONDS = 2.0
_CONTEXT = multiprocessing.get_context("fork")
_LOOK = 0.001


class RunFailed(Exception):
    """A node ended or stood still before it was told to."""


@dataclass(frozen=True)
class Plan:
    """One run: node i of `nodes` publishes `batches[i]`; those without an entry only listen.

    At most `window` batches of one node are under way, so that nothing is lost. With a `rate`, in batches a second of
    all together, each goes out at its time instead. `until_stored` waits for the pools too. `direct` is
    for nodes that pass nothing on: each is connected with all others. `listen` opens those that
    do not publish, where they are of another kind.
    """

    open: Open
    nodes: int
    batches: Sequence[Sequence[Batch]]
    window: int
    rate: float = 0.0
    until_stored: bool = False
    direct: bool = False
    listen: Open | None = None

    def neighbours(self, number: int) -> list[int]:
        """Whom a node dials."""
        if self.direct:
            return list(range(number + 1, self.nodes))
        return sorted({(number + jump) % self.nodes for jump in JUMPS} - {number})

    @property
    def degree(self) -> int:
        """Neighbours of each, dialled or dialling."""
        if self.direct:
            return self.nodes - 1
        return len({jump * sign % self.nodes for jump in JUMPS for sign in (1, -1)} - {0})

    @property
    def total(self) -> int:
        """Batches of all nodes."""
        return sum(map(len, self.batches))


@dataclass
class Report:
    """What one node saw; times are of the machine's monotonic clock. `began[k]` is when `sent[k]` was asked for.

    CPU seconds are of the node's process and of its sandbox.
    """

    began: list[float] = field(default_factory=list)
    sent: list[tuple[bytes, float]] = field(default_factory=list)
    arrived: list[tuple[bytes, float]] = field(default_factory=list)
    stored: list[tuple[str, int, float]] = field(default_factory=list)
    cpu: float = 0.0
    sandbox_cpu: float = 0.0


class _Child:
    """A node in its process. `board[i * nodes + j]`: how many of node i's batches have come to node j; after those,
    how many batches each node has stored."""

    def __init__(self, plan: Plan, number: int, board: Any, pipe: Connection) -> None:
        self._plan = plan
        self._number = number
        self._board = board
        self._pipe = pipe
        self._place = {key_of(n).public_key().public_bytes_raw(): n * plan.nodes for n in range(plan.nodes)}
        self.report = Report()
        self.reported = False

    def sent(self, data: bytes) -> None:
        """See `bench.net.nodes.Seen`."""
        self.report.sent.append((name_of(data), time.monotonic()))

    def arrived(self, data: bytes) -> None:
        """See `bench.net.nodes.Seen`."""
        self.report.arrived.append((name_of(data), time.monotonic()))
        self._board[self._place[origin_of(data)] + self._number] += 1

    def stored(self, origin: str, number: int) -> None:
        """See `bench.net.nodes.Seen`."""
        self.report.stored.append((origin, number, time.monotonic()))
        self._board[self._plan.nodes**2 + self._number] += 1

    async def run(self) -> None:
        """From the start of the node to its report."""
        publishes = self._number < len(self._plan.batches)
        opening = self._plan.open if publishes or self._plan.listen is None else self._plan.listen
        async with opening(key_of(self._number), self) as node:
            await self._answer(node.address)
            await node.join(await self._told())
            await node.meshed(self._plan.degree if self._plan.direct else min(self._plan.degree, MESH_LOW))
            await self._answer("ready")
            await self._told()
            before = cpu()
            if publishes:
                await self._publish(node)
            await self._answer("done")
            await self._told()
            self.report.cpu, self.report.sandbox_cpu = (b - a for a, b in zip(before, cpu(), strict=True))
            await self._answer(self.report)
            self.reported = True

    async def _publish(self, node: Node) -> None:
        plan, begun = self._plan, time.monotonic()
        for place, batch in enumerate(plan.batches[self._number]):
            if plan.rate:
                due = begun + (place * len(plan.batches) + self._number) / plan.rate
                await trio.sleep(max(0.0, due - time.monotonic()))
            elif not await self._room(place):
                return
            self.report.began.append(time.monotonic())
            await node.publish(batch)

    async def _room(self, sent: int) -> bool:
        """Wait until fewer than `window` batches are under way to the slowest node. False if nothing moves any more."""
        moved, least = time.monotonic(), -1
        while True:
            slowest = self._slowest()
            if sent - slowest < self._plan.window:
                return True
            if slowest > least:
                moved, least = time.monotonic(), slowest
            if time.monotonic() - moved > PATIENCE:
                return False
            await trio.sleep(_LOOK)

    def _slowest(self) -> int:
        nodes, own = self._plan.nodes, self._number
        return min(int(self._board[own * nodes + other]) for other in range(nodes) if other != own)

    async def _answer(self, what: Any) -> None:
        await trio.to_thread.run_sync(self._pipe.send, what)

    async def _told(self) -> Any:
        return await trio.to_thread.run_sync(self._pipe.recv)


def cpu() -> tuple[float, float]:
    """CPU seconds of this process, and of those that it started."""
    spent = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return time.process_time(), sum(times.user + times.system for times in spent)


def _child(plan: Plan, number: int, board: Any, pipe: Connection) -> None:
    child = _Child(plan, number, board, pipe)
    try:
        trio.run(child.run)
    except Exception:
        # py-libp2p may raise on its way out, when its peers are gone before it is.
        if not child.reported:
            raise


def run(plan: Plan) -> list[Report]:
    """The reports of all nodes. Raises RunFailed."""
    board = _CONTEXT.RawArray(c_int64, plan.nodes**2 + plan.nodes)
    processes, pipes = [], []
    for number in range(plan.nodes):
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_child, args=(plan, number, board, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        addresses = [_heard(pipe, _START_SECONDS) for pipe in pipes]
        for number, pipe in enumerate(pipes):
            # With two nodes they would dial each other at the same time.
            pipe.send([addresses[other] for other in plan.neighbours(number) if plan.nodes > 2 or other > number])
        for pipe in pipes:
            _heard(pipe, _START_SECONDS)
        time.sleep(_SETTLE_SECONDS if plan.nodes > 2 else 0)
        for pipe in pipes:
            pipe.send("go")
        for pipe in pipes:
            _heard(pipe, None)
        _wait_for_all(plan, board)
        for pipe in pipes:
            pipe.send("end")
        return [_heard(pipe, None) for pipe in pipes]
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _heard(pipe: Connection, seconds: float | None) -> Any:
    try:
        if pipe.poll(seconds):
            return pipe.recv()
    except EOFError:
        raise RunFailed("a node ended early") from None
    raise RunFailed("a node found no neighbours")


def _wait_for_all(plan: Plan, board: Any) -> None:
    """Returns when everything has come, or nothing has for a while."""
    wanted = {
        origin * plan.nodes + other: len(batches)
        for origin, batches in enumerate(plan.batches)
        for other in range(plan.nodes)
        if other != origin
    }
    if plan.until_stored:
        for node in range(plan.nodes):
            own = len(plan.batches[node]) if node < len(plan.batches) else 0
            wanted[plan.nodes**2 + node] = plan.total - own
    moved, last = time.monotonic(), -1
    while (now := sum(min(board[place], count) for place, count in wanted.items())) < sum(wanted.values()):
        if now > last:
            moved, last = time.monotonic(), now
        if time.monotonic() - moved > PATIENCE:
            return
        time.sleep(0.01)
