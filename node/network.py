"""The network of a node, for the whole of its life: opened before the model loads, whatever learners come and go.

Only nodes that are not `--silo` import this, and libp2p with it.
"""

import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn, cast

import trio

from node.background import background
from node.config import Config
from node.datadir import DataDir
from node.disk import DiskFullError
from node.errors import NodeError
from node.exchange import DurablePool
from node.heartbeat import SECONDS, Beat, SnapshotFile
from node.identity import Identity
from node.snapshot import Snapshot
from node.view import View
from p2p.addresses import parse_address
from p2p.host import HostSettings, ListenError, PortTakenError, open_host
from p2p.host.finding import run_finding
from p2p.host.host import Host
from p2p.host.nat import reachable
from p2p.reasons import Reason
from p2p.schema import MAX_NAME
from p2p.swarm import Swarm, SwarmStatus, Watcher, open_swarm
from rl.nurseries import unwrapped
from rl.rollouts import ScoredGroup
from verifiers.base import TaskRef
from verifiers.sandbox import Sandbox

LEAVE_SECONDS = 2.0
"""For saying goodbye. Peers notice anyway."""

TELL_SECONDS = 60.0
"""Between two lines about what was refused: a hostile node must not fill the log."""

_HARMLESS = frozenset({Reason.UNKNOWN_TASK, Reason.OVERLOADED, Reason.CAPPED, Reason.TOO_LONG, Reason.STALE})
"""Refused through nobody's fault: nodes may differ in their tasks, limits, machines and clocks."""


class NetworkError(NodeError):
    """The network cannot be opened as it was asked for."""


@dataclass(frozen=True)
class Wiring:
    """What the network needs of the rest of the node.

    `pool` is None for a relay. `round` is the number of the round in hand; `own_task` says whether the node's own mix
    makes such tasks.
    """

    config: Config
    data: DataDir
    identity: Identity
    pool: DurablePool | None
    round: Callable[[], int]
    own_task: Callable[[TaskRef], bool]
    view: View


@asynccontextmanager
async def open_network(wiring: Wiring, checker: Sandbox | None) -> AsyncIterator[Swarm]:
    """The node's place in its swarm, reported to the view and to `swarm.json`, until the block ends.

    `checker` makes and scores what others send; a relay has none. Raises NetworkError if it cannot listen where it was
    told to.
    """
    config, data, view = wiring.config, wiring.data, wiring.view
    finding = config.network.model_copy(update={"serve_relay": config.network.serve_relay or config.node.relay})
    file = SnapshotFile(data.swarm_path, view.message)
    with unwrapped(), trio.CancelScope() as leaving:
        try:
            async with (
                open_swarm(
                    lambda watcher: _listening(wiring, watcher),
                    wiring.identity.key,
                    config.network,
                    config.admission,
                    checker,
                    None if wiring.pool is None else _Arrivals(wiring.pool),
                    round=wiring.round,
                    model="none" if config.node.relay else public_name(config.model.name),
                    peers_path=data.peers_path,
                    reputation_path=data.reputation_path,
                    contribution_path=data.contribution_path,
                    say=view.message,
                    own_task=wiring.own_task,
                    advantage=config.training.advantage,
                ) as swarm,
                background() as nursery,
            ):
                beat = Beat()
                nursery.start_soon(beat.run)
                host = cast(Host, swarm.transport)
                nursery.start_soon(run_finding, host, finding, swarm.finder.found, view.message)
                nursery.start_soon(_report, swarm, host, beat, file, view)
                try:
                    yield swarm
                finally:
                    leaving.deadline = trio.current_time() + LEAVE_SECONDS
        finally:
            # Once nobody writes it any more.
            file.remove()


def public_name(model: str) -> str:
    """The model's name as others see it: of a directory on this machine its last part alone."""
    path = Path(model).expanduser()
    name = path.name if path.is_absolute() or path.exists() else model
    return name[:MAX_NAME] or "model"


class _Arrivals:
    """Where admitted groups go: the pool, waiting while the disk is full."""

    def __init__(self, pool: DurablePool) -> None:
        self._pool = pool

    async def add(self, groups: Sequence[ScoredGroup]) -> None:
        """See `p2p.admission.Pool`."""
        try:
            await self._pool.add(groups)
        except DiskFullError:
            # The node is told to stop, and says itself that the disk is full: this waits to be cancelled with it.
            await trio.sleep_forever()


@asynccontextmanager
async def _listening(wiring: Wiring, watcher: Watcher) -> AsyncIterator[Host]:
    """The host. Where nobody chose a port and the usual one is taken, it is another. Raises NetworkError."""
    network = wiring.config.network
    settings = HostSettings(
        key=wiring.identity.key,
        listen=tuple(network.listen),
        announce=tuple(network.announce),
        max_peers=network.max_peers,
        allow=frozenset(network.allow),
        blocked=watcher.banned(),
        app_score=watcher.score,
    )
    async with AsyncExitStack() as stack:
        try:
            try:
                host = await stack.enter_async_context(open_host(settings, watcher))
            except PortTakenError as error:
                if "listen" in network.model_fields_set:
                    raise
                anywhere = tuple(str(replace(parse_address(text), port=0)) for text in network.listen)
                host = await stack.enter_async_context(open_host(replace(settings, listen=anywhere), watcher))
                ports = sorted({parse_address(text).port for text in host.addresses()})
                wiring.view.message("info", f"{error}: this node uses port {', '.join(map(str, ports))} instead")
        except ListenError as error:
            raise NetworkError(f"{error}: choose another with --listen, such as /ip4/0.0.0.0/tcp/0") from error
        yield host


async def _report(swarm: Swarm, host: Host, beat: Beat, file: SnapshotFile, view: View) -> NoReturn:
    """Tell view and file how things stand, and the operator of what was refused."""
    refusals = Refusals(view.message)
    while True:
        snapshot = snapshot_of(swarm.status(), reachable(host), beat)
        view.network(snapshot)
        refusals.tell(snapshot.rejected, trio.current_time())
        await file.write(snapshot)
        await trio.sleep(SECONDS)


def snapshot_of(status: SwarmStatus, reach: tuple[str, str], beat: Beat) -> Snapshot:
    """What stands in `swarm.json`. `reach` is whether others can dial this node, and how that is known."""
    return Snapshot.model_validate(
        {
            "time": round(time.time(), 3),
            "pid": os.getpid(),
            **asdict(status),
            "reachable": reach[0],
            "reachable_why": reach[1],
            "lag_ms": beat.lag().model_dump(),
        }
    )


class Refusals:
    """Says what was refused: at once, and then at most once a minute, summed up."""

    def __init__(self, say: Callable[[str, str], None]) -> None:
        self._say = say
        self._told: Counter[str] = Counter()
        self._not_before = 0.0

    def tell(self, rejected: Mapping[str, int], now: float) -> None:
        """`rejected` counts since the start, `now` is in trio's time."""
        new = Counter(rejected) - self._told
        if not new or now < self._not_before:
            return
        self._told = Counter(rejected)
        self._not_before = now + TELL_SECONDS
        words = ", ".join(f"{reason} {count}" for reason, count in new.most_common())
        level = "info" if new.keys() <= _HARMLESS else "warning"
        self._say(level, f"refused from other nodes: {words} (`swarmnode peers` says whose)")
