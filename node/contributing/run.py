"""A contributor: a node without a policy. It draws, has others answer, scores and shares; it trains nothing."""

import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import trio

from node import logs
from node.background import background
from node.config import Config
from node.contributing.asking import Source, ask
from node.contributing.desk import Desk
from node.contributing.opening import Office, open_desk
from node.contributing.terminal import NAME, Lines, Prompt
from node.datadir import DataDir
from node.disk import Disk
from node.errors import NodeError
from node.exchange import CurrentRound, DurablePool
from node.identity import Identity
from node.record import MetricsFile
from node.scoring import open_checker, open_stream, warn_of_open_sandbox
from node.stop import Stop, watch_signals
from node.view import PlainView, View
from p2p.swarm import Swarm
from rl.pool import PoolError, SqlitePool
from verifiers.base import VerifierError
from verifiers.sandbox import Sandbox, open_sandbox
from verifiers.stream import TaskStream

LINGER_SECONDS = 5.0
"""For sending what was answered last, at the end. What is not sent then is kept."""

OpenSource = Callable[[], AbstractAsyncContextManager[Source]]


@dataclass(frozen=True)
class Wanted:
    """`source` answers, or if it is None a person; `name` is told to others as the model. `tasks`, or without end."""

    name: str = NAME
    source: OpenSource | None = None
    tasks: int | None = None
    at_once: int = 1


def contribute(config: Config, wanted: Wanted) -> int:
    """Take part in the swarm until whoever answers is done, or told to stop. Returns the exit status."""
    if config.sharing.silo:
        raise NodeError("[sharing] silo is on, and answers are for other nodes: turn it off to contribute")
    if config.sharing.share == "none":
        raise NodeError('[sharing] share is "none", and answers are for other nodes: set it to another value')
    view = PlainView()
    try:
        trio.run(_serve, config, wanted, view)
    except (PoolError, VerifierError) as error:
        view.message("error", str(error))
        return 1
    except sqlite3.OperationalError as error:
        logs.get().debug("the system refused", exc_info=True)
        view.message("error", f"the system refused something in {config.node.data_dir}: {error}")
        return 1
    return 0


async def _serve(config: Config, wanted: Wanted, view: View) -> None:
    stop = Stop()
    with DataDir.open(config.node.data_dir) as data:
        identity = Identity.load_or_create(data.identity_path)
        disk = Disk(data.path, config.storage.min_free_mb, stop, view.message)
        last = MetricsFile(data.metrics_path).last(1)
        current = CurrentRound(last[-1].round + 1 if last else 1)
        with SqlitePool(data.pool_path, identity.node_id, config.pool.max_groups, config.pool.per_peer) as pool:
            async with (
                background() as nursery,
                open_sandbox(config.verifiers, [config.node.data_dir]) as sandbox,
                open_checker(config) as checker,
            ):
                await nursery.start(watch_signals, stop, view.message, "what was answered and not sent is kept")
                stream: TaskStream | None = None
                with stop.interruptible():
                    # Its seed does not matter: the desk has another.
                    stream = await open_stream(config, 0, sandbox, checker)
                    warn_of_open_sandbox(sandbox, view)
                if stream is None:
                    return
                assert checker is not None, "this is no silo"
                shared = DurablePool(pool, disk)
                office = Office(config, data, identity, stream, sandbox, shared, disk, current)
                with open_desk(office, wanted.name) as desk:
                    async with _open_swarm(
                        config, wanted, data, identity, shared, current, view, checker, stream
                    ) as swarm:
                        await _answer(desk, swarm, stop, wanted, view)


@asynccontextmanager
async def _open_swarm(
    config: Config,
    wanted: Wanted,
    data: DataDir,
    identity: Identity,
    pool: DurablePool,
    current: CurrentRound,
    view: View,
    checker: Sandbox,
    stream: TaskStream,
) -> AsyncIterator[Swarm]:
    """The swarm, to which this node is one whose model is whoever answers."""
    from node.network import Wiring, open_network

    named = config.model_copy(update={"model": config.model.model_copy(update={"name": wanted.name})})
    async with open_network(Wiring(named, data, identity, pool, current, stream.makes, view), checker) as swarm:
        yield swarm


async def _answer(desk: Desk, swarm: Swarm, stop: Stop, wanted: Wanted, view: View) -> None:
    if desk.waiting:
        view.message("info", f"{desk.waiting} groups of the last time are sent as soon as a node is found")
    async with background() as nursery:
        nursery.start_soon(desk.send, swarm)
        try:
            with stop.interruptible():
                await _until_done(desk, swarm, wanted, view)
            if not stop.requested:
                with stop.interruptible(), trio.move_on_after(LINGER_SECONDS):
                    while desk.waiting:
                        await trio.sleep(0.05)
        finally:
            left = f"; {desk.waiting} are kept and sent by the next `swarmnode contribute`" if desk.waiting else ""
            tell = _show if wanted.source is None else partial(view.message, "info")
            tell(f"{desk.made} groups made, {desk.sent} sent{left}")


async def _until_done(desk: Desk, swarm: Swarm, wanted: Wanted, view: View) -> None:
    if wanted.source is None:
        status = swarm.status()
        _show(f"Swarm {status.swarm}, as node {status.peer_id}. What you answer is public there.\n")
        await Prompt(desk, Lines(4 * desk.longest), _show, lambda: swarm.totals().peers, _cue).run(wanted.tasks)
        return
    async with wanted.source() as source:
        await ask(desk, source, wanted.tasks, wanted.at_once, view.message)


def _cue() -> None:
    if sys.stdin.isatty() and sys.stdout.isatty():
        print("> ", end="", flush=True)


def _show(text: str) -> None:
    # Characters that this terminal cannot show.
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)
