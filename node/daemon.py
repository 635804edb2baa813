"""The daemon: the one place that wires the parts of a node together, and the line between errors and the operator."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext

import trio

from node import logs
from node.api.control import Control
from node.api.current import CurrentLearner
from node.background import background
from node.config import RELAY, Config
from node.contributing.opening import Office, Place, take_answers
from node.datadir import DataDir
from node.disk import Disk
from node.errors import NodeError
from node.evaluations import EvaluationsFile
from node.exchange import CurrentRound, DurablePool, Network, Silent
from node.identity import Identity
from node.measuring import Evaluator
from node.parts import Parts
from node.record import MetricsFile
from node.rounds import Rounds
from node.scoring import open_checker, open_stream, warn_of_open_sandbox
from node.sinks import open_sinks
from node.stop import Stop, watch_signals
from node.view import NodeInfo, View, open_view
from rl.checkpoint import Checkpoint, CheckpointStore
from rl.errors import CheckpointError
from rl.pool import PoolError, SqlitePool
from verifiers.base import VerifierError
from verifiers.sandbox import Sandbox, open_sandbox
from verifiers.stream import TaskStream, seed_of


class RelayError(NodeError):
    """Something was asked of a relay that only a node with a model can do."""

    exit_status = 2


class SeedError(NodeError):
    """The seed that was asked for is not the one this node has been trained with."""

    exit_status = 2


def run(config: Config, rounds: int | None) -> int:
    """Run a node until round `rounds` is done (without end if None) or it is told to stop. Returns the exit status.

    What the operator can put right is said in one message; any other exception is a fault of ours and is raised.
    """
    with open_view(config.log) as view:
        try:
            if config.node.relay:
                trio.run(_relay, config, rounds, view)
            else:
                trio.run(serve, config, rounds, view)
        except (NodeError, PoolError, CheckpointError, VerifierError) as error:
            view.message("error", str(error))
            return error.exit_status if isinstance(error, NodeError) else 1
        except (OSError, sqlite3.OperationalError) as error:
            logs.get().debug("the system refused", exc_info=True)
            view.message("error", f"the system refused something in {config.node.data_dir}: {error}")
            return 1
        except KeyboardInterrupt:
            return 130
    return 0


async def serve(config: Config, rounds: int | None, view: View) -> None:
    """Run a node in `config.node.data_dir` until it is done or told to stop by SIGINT or SIGTERM.

    Raises what the parts raise when they cannot be used: DataDirError, PoolError, VerifierError, LearnerFailed, ...
    """
    stop = Stop()
    with DataDir.open(config.node.data_dir) as data:
        identity = Identity.load_or_create(data.identity_path)
        checkpoints = CheckpointStore(data.checkpoints_path, config.checkpoint.keep)
        checkpoint = checkpoints.newest()
        seed = _seed(config, identity, checkpoint)
        disk = Disk(data.path, config.storage.min_free_mb, stop, view.message)
        current = CurrentRound(checkpoint.round + 1 if checkpoint else 1)
        with (
            SqlitePool(data.pool_path, identity.node_id, config.pool.max_groups, config.pool.per_peer) as pool,
            open_sinks(config.sinks, data.path, identity.node_id) as sinks,
        ):
            async with (
                background() as nursery,
                open_sandbox(config.verifiers, [config.node.data_dir]) as sandbox,
                open_checker(config) as checker,
            ):
                await nursery.start(watch_signals, stop, view.message)
                stream: TaskStream | None = None
                with stop.interruptible():
                    stream = await open_stream(config, seed, sandbox, checker)
                    warn_of_open_sandbox(sandbox, view)
                if stream is None:
                    return
                shared = DurablePool(pool, disk)
                policy, control, place = CurrentLearner(stop), Control(stop, current.number - 1), Place()
                office = Office(config, data, identity, stream, sandbox, shared, disk, current)
                async with (
                    _open_api(config, data, identity, policy, control, place, view) as view,
                    _open_swarm(config, data, identity, shared, current, view, checker, stream) as swarm,
                    _take_answers(office, place, swarm, view),
                ):
                    parts = Parts(
                        config=config,
                        data=data,
                        identity=identity,
                        sandbox=sandbox,
                        stream=stream,
                        pool=pool,
                        swarm=swarm,
                        metrics=MetricsFile(data.metrics_path),
                        checkpoints=checkpoints,
                        evaluator=Evaluator(
                            config,
                            sandbox,
                            EvaluationsFile(data.evaluations_path),
                            checkpoints,
                            disk,
                            seed,
                            view.message,
                        ),
                        sinks=sinks,
                        view=view,
                        stop=stop,
                        disk=disk,
                        seed=seed,
                        checkpoint=checkpoint,
                        current=current,
                        policy=policy,
                        control=control,
                    )
                    await Rounds(parts, rounds).run()


async def _relay(config: Config, rounds: int | None, view: View) -> None:
    """Be a node of the swarm that has no model and no rounds, until told to stop. Raises what its parts raise."""
    if rounds is not None:
        raise RelayError("a relay has no rounds: leave --rounds out, or --relay")
    from node.network import Wiring, open_network

    stop = Stop()
    with DataDir.open(config.node.data_dir) as data:
        identity = Identity.load_or_create(data.identity_path)
        if not data.checkpoints_path.is_dir():
            # That of a run is for those who go on with it.
            data.write_config(config)
        control = Control(stop)
        async with background() as nursery:
            await nursery.start(watch_signals, stop, view.message)
            async with (
                _open_api(config, data, identity, CurrentLearner(stop), control, Place(), view) as view,
                open_network(Wiring(config, data, identity, None, lambda: 0, lambda ref: False, view), None),
            ):
                view.started(NodeInfo(identity.node_id, config.node.name, RELAY, "-", "-", str(data.path), 0, None))
                view.phase("relay")
                with stop.interruptible():
                    await trio.sleep_forever()


@asynccontextmanager
async def _open_api(
    config: Config,
    data: DataDir,
    identity: Identity,
    policy: CurrentLearner,
    control: Control,
    place: Place,
    view: View,
) -> AsyncIterator[View]:
    """Dashboard, control and the endpoint for other programs, as far as they are wanted. Whoever tells the view that
    is yielded tells those who look over HTTP, too.
    """
    api = config.api
    if not (api.dashboard or api.openai):
        yield view
        return
    # They bring an HTTP server, which a node without them need not load.
    from node.api.feed import Feed
    from node.api.server import PortError, open_api
    from node.api.v1 import Seen

    feed = Feed(view)
    async with AsyncExitStack() as stack:
        try:
            seen = Seen(config, data, identity.node_id, feed, control, place)
            await stack.enter_async_context(open_api(api, policy, view.message, seen))
        except PortError as error:
            # What nobody asked for keeps no node from training.
            if api.openai or api.model_fields_set & {"dashboard", "host", "port"}:
                raise
            view.message("warning", f"there is no dashboard: {error}")
        yield feed


@asynccontextmanager
async def _open_swarm(
    config: Config,
    data: DataDir,
    identity: Identity,
    pool: DurablePool,
    current: CurrentRound,
    view: View,
    checker: Sandbox | None,
    stream: TaskStream,
) -> AsyncIterator[Network]:
    """The other nodes, or nobody where there is no checker for what they send."""
    if checker is None:
        yield Silent()
        return
    # Not even looked at by a node that trains alone.
    from node.network import Wiring, open_network

    async with open_network(Wiring(config, data, identity, pool, current, stream.makes, view), checker) as swarm:
        yield swarm


def _take_answers(office: Office, place: Place, swarm: Network, view: View) -> AbstractAsyncContextManager[None]:
    """The desk for people, where they can be shown tasks and there is somebody to share their answers with."""
    if office.config.sharing.silo or not office.config.api.dashboard:
        return nullcontext()
    return take_answers(office, place, swarm, view)


def _seed(config: Config, identity: Identity, checkpoint: Checkpoint | None) -> int:
    """What fixes tasks and sampling: the configured seed, else that of the run to go on with, else the identity's.

    Raises SeedError where the first two differ: the task stream would jump, and no run could be repeated from it.
    """
    if checkpoint is None:
        return seed_of(identity.public_bytes) if config.node.seed is None else config.node.seed
    trained = int(checkpoint.state["seed"])
    if config.node.seed not in (None, trained):
        raise SeedError(
            f"{config.node.data_dir} has been trained with seed {trained}, not {config.node.seed}: leave --seed out to"
            " go on, or start in another --data-dir"
        )
    return trained
