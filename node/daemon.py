"""The daemon: wires the parts of a node together, supervises them, and makes sure that nothing is lost.

A node's life is a chain of learner lives. Each begins from the newest good checkpoint, rewinds everything else (record,
pool, task stream) to the same round, and runs rounds until the node is told to stop, is done, or the learner dies.
Because all else follows the checkpoint, a crash at any moment costs at most the rounds since the last one, and every
round is recorded once.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import trio

from node.background import background
from node.config import Config
from node.datadir import DataDir
from node.disk import Disk
from node.errors import NodeError
from node.identity import Identity
from node.learner import LearnerDied, LearnerFailed, LearnerProcess, open_learner
from node.record import MetricsFile, Record
from node.sinks import Sink, open_sinks
from node.stop import Stop, watch_signals
from node.view import NodeInfo, View, open_view
from rl.checkpoint import Checkpoint, CheckpointStore
from rl.errors import CheckpointError
from rl.pool import PoolError, SqlitePool
from rl.rollouts import Sampling, ScoredGroup
from rl.sapo import RoundPlan, RoundResult, Sapo
from verifiers.base import VerifierError
from verifiers.sandbox import Sandbox, open_sandbox
from verifiers.stream import TaskStream, seed_of

MAX_DEATHS = 3
"""Learners that may die one after the other, without a finished round between, before the node gives up."""

_RESTART_SECONDS = 2.0


@dataclass(frozen=True)
class Parts:
    """What a node is made of, wired once. Only the learner is replaced during its life."""

    config: Config
    data: DataDir
    identity: Identity
    sandbox: Sandbox
    stream: TaskStream
    pool: SqlitePool
    metrics: MetricsFile
    checkpoints: CheckpointStore
    sinks: list[Sink]
    view: View
    stop: Stop
    disk: Disk
    seed: int


class _DurablePool:
    """`rl.protocols.Pool` over SQLite: adding waits while the disk is full."""

    def __init__(self, pool: SqlitePool, disk: Disk) -> None:
        self._pool = pool
        self._disk = disk

    async def add(self, groups: Sequence[ScoredGroup]) -> None:
        async def write() -> None:
            self._pool.add(groups)

        await self._disk.write("the pool", write)


class Node:
    """Runs the rounds of one node until it is done, told to stop, or cannot go on."""

    def __init__(self, parts: Parts, rounds: int | None) -> None:
        self._parts = parts
        self._rounds = rounds
        self._done = 0
        self._saved = 0
        self._finished = 0
        self._cursor: Mapping[str, Any] = parts.stream.cursor
        self._first_cursor = self._cursor

    async def run(self) -> None:
        """Raises LearnerDied if learners keep dying, LearnerFailed or DiskFullError when it cannot go on."""
        deaths = 0
        while not self._parts.stop.requested:
            before = self._finished
            try:
                await self._live()
            except LearnerDied as error:
                if self._parts.stop.requested:
                    raise
                deaths = 1 if self._finished > before else deaths + 1
                if deaths == MAX_DEATHS:
                    raise LearnerDied(f"{error}\n{deaths} learners died without a finished round; giving up") from error
                self._parts.view.message("error", f"{error}\nstarting another from the last checkpoint")
                with self._parts.stop.interruptible():
                    await trio.sleep(_RESTART_SECONDS * deaths)
            else:
                return

    async def _live(self) -> None:
        """One life of the learner."""
        parts = self._parts
        checkpoint = parts.checkpoints.newest()
        if self._rounds is not None and checkpoint and checkpoint.round >= self._rounds:
            parts.view.message("info", f"round {checkpoint.round} is done already: nothing is left to do")
            return
        async with open_learner(parts.view.progress, parts.view.message) as learner:
            with parts.stop.interruptible():
                parts.view.phase("load model")
                await learner.start(
                    parts.config.learner_settings(parts.seed), checkpoint.state["model"] if checkpoint else None
                )
                if checkpoint:
                    await learner.load(checkpoint.path)
            if parts.stop.requested:
                return
            self._resume(checkpoint)
            parts.view.started(_info(parts, learner, self._done, self._rounds))
            try:
                await self._train(learner)
            except LearnerFailed:
                # What failed was the round in hand; the policy is still that of the last finished one, unless the
                # failure was such that the learner ended itself.
                with suppress(LearnerDied):
                    await self._save(learner)
                raise
            await self._save(learner)

    async def _train(self, learner: LearnerProcess) -> None:
        parts = self._parts
        sapo = Sapo(
            _plan(parts), learner, parts.stream, parts.sandbox, _DurablePool(parts.pool, parts.disk), parts.view.phase
        )
        while self._rounds is None or self._done < self._rounds:
            result: RoundResult | None = None
            with parts.stop.interruptible():
                await parts.disk.wait_for_room()
                result = await sapo.round(self._done + 1)
            if result is None:
                return
            await self._record(result)
            if result.number % parts.config.checkpoint.every == 0:
                await self._save(learner)

    async def _record(self, result: RoundResult) -> None:
        parts = self._parts
        record = _record_of(result)

        async def write() -> None:
            parts.metrics.append(record)

        await parts.disk.write("metrics.jsonl", write)
        self._done = result.number
        self._finished += 1
        self._cursor = parts.stream.cursor
        per_kind = _per_kind(result.local)
        for sink in parts.sinks:
            sink.write(record, per_kind)
        parts.view.round_finished(record, per_kind, result.local)

    async def _save(self, learner: LearnerProcess) -> None:
        """Write a checkpoint of the last finished round, unless there is one."""
        if self._done == self._saved:
            return
        parts = self._parts
        parts.view.phase("checkpoint")

        async def write() -> None:
            with parts.checkpoints.writing(self._done, self._state(learner)) as directory:
                await learner.save(directory)

        await parts.disk.write(f"the checkpoint of round {self._done}", write)
        self._saved = self._done

    def _state(self, learner: LearnerProcess) -> dict[str, Any]:
        return {
            "model": learner.description["model"],
            "cursor": dict(self._cursor),
            "seed": self._parts.seed,
            "node_id": self._parts.identity.node_id,
        }

    def _resume(self, checkpoint: Checkpoint | None) -> None:
        """Bring record, pool and task stream back to the checkpoint's round."""
        parts = self._parts
        self._done = self._saved = checkpoint.round if checkpoint else 0
        self._cursor = checkpoint.state["cursor"] if checkpoint else self._first_cursor
        parts.stream.restore(self._cursor)
        parts.pool.rewind(self._done)
        again = parts.metrics.rewind(self._done)
        if checkpoint:
            parts.view.message("info", f"resuming after round {self._done} from {checkpoint.path}")
        if again:
            parts.view.message("warning", f"{again} rounds after round {self._done} have no checkpoint: done again")


async def serve(config: Config, rounds: int | None, view: View) -> None:
    """Run a node in `config.node.data_dir` until it is done or told to stop by SIGINT or SIGTERM.

    Raises what the parts raise when they cannot be used: DataDirError, PoolError, VerifierError, LearnerFailed, ...
    """
    stop = Stop()
    with DataDir.open(config.node.data_dir) as data:
        data.write_config(config)
        identity = Identity.load_or_create(data.identity_path)
        seed = seed_of(identity.public_bytes) if config.node.seed is None else config.node.seed
        disk = Disk(data.path, config.storage.min_free_mb, stop, view.message)
        with (
            SqlitePool(data.pool_path, config.pool.max_groups) as pool,
            open_sinks(config.sinks, data.path, identity.node_id) as sinks,
        ):
            async with background() as nursery, open_sandbox(config.verifiers) as sandbox:
                await nursery.start(watch_signals, stop)
                parts = Parts(
                    config=config,
                    data=data,
                    identity=identity,
                    sandbox=sandbox,
                    stream=await TaskStream.open(sandbox, config.tasks.mix, seed),
                    pool=pool,
                    metrics=MetricsFile(data.metrics_path),
                    checkpoints=CheckpointStore(data.checkpoints_path, config.checkpoint.keep),
                    sinks=sinks,
                    view=view,
                    stop=stop,
                    disk=disk,
                    seed=seed,
                )
                await Node(parts, rounds).run()


def _plan(parts: Parts) -> RoundPlan:
    sampling = parts.config.sampling
    return RoundPlan(
        origin=parts.identity.node_id,
        local=parts.config.sharing.local,
        sampling=Sampling(
            samples=sampling.group_size,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        ),
        advantage=parts.config.training.advantage,
        seed=parts.seed,
    )


def _info(parts: Parts, learner: LearnerProcess, done: int, rounds: int | None) -> NodeInfo:
    about = learner.description
    return NodeInfo(
        node_id=parts.identity.node_id,
        name=parts.config.node.name,
        model=about["model"],
        device=about["device"],
        engine=about["engine"],
        data_dir=str(parts.data.path),
        done=done,
        rounds=rounds,
    )


def _record_of(result: RoundResult) -> Record:
    stats = result.stats
    stepped = stats.tokens_trained > 0
    return Record(
        round=result.number,
        time=time.time(),
        policy_step=stats.policy_step,
        local_groups=len(result.local),
        external_groups=0,
        reward_local=result.reward_local,
        reward_external=None,
        informative_fraction=result.informative_fraction,
        tokens_generated=result.tokens_generated,
        seconds_generate=result.seconds_generate,
        seconds_score=result.seconds_score,
        seconds_update=result.seconds_update,
        tokens_trained=stats.tokens_trained,
        loss=stats.loss if stepped else None,
        clip_fraction=stats.clip_fraction if stepped else None,
        entropy=stats.entropy if stepped else None,
        grad_norm=stats.grad_norm if stepped else None,
        engine_logprob_gap=stats.engine_logprob_gap,
        peers=0,
        batches_sent=0,
        batches_received=0,
        rejected={},
    )


def _per_kind(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Mean reward of each kind of task, by name."""
    rewards: dict[str, list[float]] = {}
    for scored in groups:
        rewards.setdefault(scored.group.task.kind, []).append(scored.mean_reward)
    return {kind: sum(values) / len(values) for kind, values in sorted(rewards.items())}


def run(config: Config, rounds: int | None) -> int:
    """Run a node until round `rounds` is done (without end if None) or it is told to stop. Returns the exit status.

    What the operator can put right is said in one message; any other exception is a fault of ours and is raised.
    """
    with open_view(config.log) as view:
        try:
            trio.run(serve, config, rounds, view)
        except (NodeError, PoolError, CheckpointError, VerifierError) as error:
            view.message("error", str(error))
            return error.exit_status if isinstance(error, NodeError) else 1
        except KeyboardInterrupt:
            return 130
    return 0
