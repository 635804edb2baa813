"""What is measured: speed, delay, cost of each stage, and what one node can admit. Pure numbers out of runs."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import trio

from bench.net import stages
from bench.net.batches import Maker, fitted, key_of, make_tasks, sealed
from bench.net.nodes import VERIFIERS, Batch, Open, open_checked, open_libp2p, open_node, open_plain, open_tcp
from bench.net.runs import Plan, Report, run
from p2p.ids import peer_id_of
from verifiers.base import Task
from verifiers.sandbox import open_sandbox

Figures = dict[str, Any]
"""What is written as JSON: sections, and in them figures by kind of node, number of nodes, kilobytes."""

KINDS: dict[str, Open] = {
    "tcp": open_tcp,
    "libp2p": open_libp2p,
    "gossip": open_plain,
    "relay": open_checked,
    "node": open_node,
}
FAST = "tcp", "libp2p", "gossip", "relay"
STEADY = "libp2p", "relay", "node"

PAIR = 2
"""Nodes of a publisher and a listener; what concerns one node alone is measured beside these."""

UNDER_WAY = 16
"""Batches of all nodes that are on their way at once: py-libp2p loses some of more without a word."""
PAIR_UNDER_WAY = 12

_TASKS = 60


@dataclass(frozen=True)
class Load:
    """How much is published: batches of all nodes as fast as it goes, and a second, for so many, at a steady rate."""

    fast: int
    rate: float
    steady: int


LOADS = {
    (2, 1): Load(1500, 10, 200),
    (2, 32): Load(400, 10, 200),
    (2, 256): Load(80, 2, 60),
    (8, 1): Load(120, 4, 40),
    (8, 32): Load(80, 4, 40),
    (8, 256): Load(24, 0.5, 8),
    (16, 1): Load(64, 2, 32),
    (16, 32): Load(48, 2, 32),
    (16, 256): Load(16, 0.5, 16),
}
"""By nodes and kilobytes. The steady rates leave the whole node half of two cores."""
ADMITTED = {1: 400, 32: 200, 256: 40}
"""Batches that one node is given at once, by kilobytes: fewer than may wait for their check."""
SMOKE = Load(40, 20, 20)


@dataclass
class Speed:
    """As fast as it goes: medians over the repeats. CPU seconds a batch of the nodes that publish and of the others,
    which are the same where all publish; `lost` of all that should have arrived."""

    batches: float
    bytes: float
    send_cpu: float
    receive_cpu: float
    lost: float
    each: list[float] = field(default_factory=list)


@dataclass
class Delay:
    """At a steady rate: seconds from the publication until a batch was taken in by each other node, and until all of
    its groups were in that node's pool. `lost` of the arrivals by gossip, `unstored` of those in pools: the catch-up
    brings what gossip does not."""

    rate: float
    arrived: tuple[float, float, float] | None
    stored: tuple[float, float, float] | None
    lost: float
    unstored: float


@dataclass
class Admits:
    """One node under more than it can take: batches a second through the check and into the store, and through
    everything into the pool; the former while the latter lags behind too. `lost` of all, on their way to the pool."""

    checked: float
    checked_meanwhile: float
    stored: float
    groups: float
    lost: float


class World:
    """Tasks, and batches of each size, the same ones for all kinds of node."""

    def __init__(self, tasks: Sequence[Task], sizes: Sequence[int]) -> None:
        self._tasks = tasks
        self.shapes = {size: fitted(tasks, f"{size} KB", size * 1024) for size in sizes}

    def batches(self, size: int, total: int, publishers: int) -> list[list[Batch]]:
        """`total` batches, shared out over the publishers."""
        found = []
        for node in range(publishers):
            maker, key = Maker(self._tasks, node + 1), key_of(node)
            count = max(1, total // publishers)
            made = [maker.groups(self.shapes[size], number) for number in range(1, count + 1)]
            found.append(
                [Batch(sealed(key, groups, place + 1), groups, place + 1) for place, groups in enumerate(made)]
            )
        return found


def measure(
    nodes: Sequence[int], sizes: Sequence[int], repeats: int, smoke: bool, say: Callable[[str], None]
) -> Figures:
    """Everything. Raises RunFailed."""
    world = World(trio.run(_tasks), sizes)
    shapes = {str(size): asdict(world.shapes[size]) for size in sizes}
    found: Figures = {"shapes": shapes, "fast": {}, "steady": {}, "stages": {}, "admits": {}}
    for count in nodes:
        for size in sizes:
            load, place = SMOKE if smoke else LOADS[count, size], (str(count), str(size))
            for section, work in (("fast", fast), ("steady", steady)):
                say(f"{count} nodes, {size} KB, {section}")
                results = work(world, count, size, load, repeats)
                found[section].setdefault(place[0], {})[place[1]] = {kind: asdict(one) for kind, one in results.items()}
    for size in sizes if PAIR in nodes else ():
        say(f"{size} KB, stages and admission")
        few = 10 if smoke else min(100, LOADS[2, size].fast)
        found["stages"][str(size)] = trio.run(stages.measure, world.batches(size, few, 1)[0])
        found["admits"][str(size)] = asdict(admits(world, size, SMOKE.fast if smoke else ADMITTED[size]))
    return found


async def _tasks() -> list[Task]:
    async with open_sandbox(VERIFIERS, []) as sandbox:
        return await make_tasks(sandbox, _TASKS)


def fast(world: World, nodes: int, size: int, load: Load, repeats: int) -> dict[str, Speed]:
    """Each kind as fast as it goes, in turns."""
    window = PAIR_UNDER_WAY if nodes == PAIR else max(1, UNDER_WAY // nodes)
    batches = world.batches(size, load.fast, 1 if nodes == PAIR else nodes)
    speeds: dict[str, list[Speed]] = {kind: [] for kind in FAST}
    for _ in range(repeats):
        for kind in FAST:
            plan = Plan(KINDS[kind], nodes, batches, window, direct=kind == "tcp")
            speeds[kind].append(speed_of(plan, run(plan)))
    return {kind: _median(each) for kind, each in speeds.items()}


def speed_of(plan: Plan, reports: Sequence[Report]) -> Speed:
    """From the first publication to the last arrival; what did not arrive counts as not sent."""
    begun = min(report.began[0] for report in reports if report.began)
    arrivals = [at for report in reports for _, at in report.arrived]
    seconds = max(arrivals) - begun
    due = plan.total * (plan.nodes - 1)
    share = len(arrivals) / due
    publishers, others = reports[: len(plan.batches)], reports[len(plan.batches) :] or reports
    size = statistics.fmean(len(batch.envelope.data) for batches in plan.batches for batch in batches)
    rate = plan.total * share / seconds
    return Speed(
        rate,
        rate * size,
        statistics.fmean(report.cpu for report in publishers) / plan.total,
        statistics.fmean(report.cpu for report in others) / plan.total,
        1 - share,
        [rate],
    )


def _median(speeds: Sequence[Speed]) -> Speed:
    def middle(of: Callable[[Speed], float]) -> float:
        return statistics.median(map(of, speeds))

    return Speed(
        middle(lambda one: one.batches),
        middle(lambda one: one.bytes),
        middle(lambda one: one.send_cpu),
        middle(lambda one: one.receive_cpu),
        max(one.lost for one in speeds),
        [one.batches for one in speeds],
    )


def steady(world: World, nodes: int, size: int, load: Load, repeats: int) -> dict[str, Delay]:
    """Each kind at a rate that all of them bear, every node publishing."""
    batches = world.batches(size, load.steady, nodes)
    found = {}
    for kind in STEADY:
        plan = Plan(KINDS[kind], nodes, batches, 0, load.rate, until_stored=kind == "node")
        found[kind] = delay_of(plan, run(plan))
    return found


def delay_of(plan: Plan, reports: Sequence[Report]) -> Delay:
    """Of every batch at every node that it came to. The way to the pool begins with the sealing."""
    sent = {name: at for report in reports for name, at in report.sent}
    arrived = [at - sent[name] for report in reports for name, at in report.arrived]
    began = {
        (peer_id_of(key_of(node).public_key().public_bytes_raw()), place + 1): at
        for node, report in enumerate(reports)
        for place, at in enumerate(report.began)
    }
    stored = [at - began[origin, number] for report in reports for origin, number, at in report.stored]
    due = plan.total * (plan.nodes - 1)
    lost, unstored = (1 - len(times) / due for times in (arrived, stored))
    return Delay(plan.rate, _spread(arrived), _spread(stored), lost, unstored)


def _spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Median, 99th percentile and the greatest."""
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98], max(values)


def admits(world: World, size: int, count: int) -> Admits:
    """One node hears batches as fast as another, which has them sealed already, can send them."""
    batches = world.batches(size, count, 1)
    relay, node = KINDS["relay"], KINDS["node"]
    checked = _rate([at for _, at in run(Plan(relay, PAIR, batches, PAIR_UNDER_WAY))[1].arrived])
    listener = run(Plan(relay, PAIR, batches, PAIR_UNDER_WAY, until_stored=True, listen=node))[1]
    stored = _rate([at for _, _, at in listener.stored])
    meanwhile = _rate([at for _, at in listener.arrived])
    groups, lost = stored * world.shapes[size].groups, 1 - len(listener.stored) / count
    return Admits(checked, meanwhile, stored, groups, lost)


def _rate(times: Sequence[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])
