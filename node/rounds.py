"""The life of a node: rounds, checkpoints, and what happens when the learner dies.

A node's life is a chain of learner lives. Each begins from the newest good checkpoint, rewinds everything else (record,
pool, task stream) to the same round, and runs rounds until the node is told to stop, is done, or the learner dies.
Because all else follows the checkpoint, a crash at any moment costs at most the rounds since the last one, and every
round is recorded once.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

import trio

from node.errors import NodeError
from node.exchange import Counts, DurablePool
from node.learner import LearnerDied, LearnerFailed, LearnerProcess, open_learner
from node.outcome import record_of, rewards_by_kind
from node.parts import Parts, plan_of
from node.view import NodeInfo
from rl.checkpoint import Checkpoint
from rl.model_names import recipe_of
from rl.sapo import RoundResult, Sapo
from rl.selection import STRATEGIES
from verifiers.base import VerifierError

MAX_DEATHS = 3
"""Learners that may die one after the other, without getting further than any before, until the node gives up."""

MAX_FAILED_UPDATES = 3
"""Learning steps that may fail one after the other until the node gives up."""

_RESTART_SECONDS = 2.0


class NothingToResumeError(NodeError):
    """Rounds are recorded, and no checkpoint to go on from is left. Starting over in silence would bury them."""


class Rounds:
    """Runs the rounds of one node, up to round `last` or without end, until it is told to stop or cannot go on."""

    def __init__(self, parts: Parts, last: int | None) -> None:
        self._parts = parts
        self._last = last
        self._done = 0
        self._saved = 0
        self._furthest = 0
        self._policy_step = 0
        self._failed_updates = 0
        self._restarts = 0
        self._told_restarts: dict[int, int] = {}
        self._waited = False
        self._outcomes: Counter[str] = Counter()
        self._counted = Counts()
        self._known_checkpoint = parts.checkpoint
        self._first_cursor: Mapping[str, int] = parts.stream.cursor
        self._cursor: Mapping[str, int] = self._first_cursor

    async def run(self) -> None:
        """Raises a NodeError or VerifierError when it cannot go on; what was trained until then is saved."""
        deaths = 0
        while not self._parts.stop.requested:
            before = self._furthest
            try:
                await self._live()
            except LearnerDied as error:
                if self._parts.stop.requested:
                    raise
                # Rounds that are done again are no progress: a learner that dies in the same round each time would
                # be started for ever.
                self._restarts += 1
                deaths = 1 if self._furthest > before else deaths + 1
                if deaths == MAX_DEATHS:
                    raise LearnerDied(f"{error}\n{deaths} learners died and none got further; giving up") from error
                self._parts.view.message("error", f"{error}\nstarting another from the last checkpoint")
                with self._parts.stop.interruptible():
                    await trio.sleep(_RESTART_SECONDS * deaths)
            else:
                return

    async def _live(self) -> None:
        """One life of the learner."""
        parts = self._parts
        checkpoint = await self._checkpoint()
        if self._is_last(checkpoint):
            parts.view.message("info", f"round {self._last} is done already: nothing is left to do")
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
            await self._resume(checkpoint)
            self._introduce(learner)
            try:
                async with parts.policy.lent(learner):
                    with parts.stop.interruptible():
                        await self._wait_for_peers()
                    await self._train(learner)
            except (LearnerFailed, VerifierError):
                # What failed was the round in hand; the policy is still that of the last finished one, unless the
                # failure was such that the learner ended itself.
                with suppress(LearnerDied):
                    await self._save(learner)
                raise
            await self._save(learner)
            if self._saved:
                parts.view.message(
                    "info",
                    f"round {self._saved} is saved in {parts.data.path}: the same command goes on from there, and"
                    f" `swarmnode eval --data-dir {parts.data.path}` measures it",
                )

    async def _wait_for_peers(self) -> None:
        """Before the first round of the node's life, if the configuration asks for it."""
        parts, network = self._parts, self._parts.config.network
        if self._waited:
            return
        wanted = 0 if parts.config.sharing.silo else network.wait_for_peers
        if wanted:
            parts.view.phase("wait for peers")
        # Also where there is nobody to wait for: others may wait for this node.
        found = await parts.swarm.wait_for_peers(wanted, network.wait_seconds)
        self._waited = True
        if found < wanted:
            parts.view.message("info", f"{found} of {wanted} nodes found within {network.wait_seconds:g} s: going on")

    async def _train(self, learner: LearnerProcess) -> None:
        parts = self._parts
        sapo = Sapo(
            plan_of(parts),
            learner,
            parts.stream,
            parts.sandbox,
            DurablePool(parts.pool, parts.disk),
            parts.swarm,
            STRATEGIES[parts.config.sharing.selection](parts.config.sharing.half_life),
            parts.view.phase,
        )
        await self._evaluate(learner)
        while self._last is None or self._done < self._last:
            result: RoundResult | None = None
            await self._heed(learner)
            with parts.stop.interruptible():
                await parts.disk.wait_for_room()
                number = self._done + 1
                result = await sapo.round(number, another=number != self._last)
            if result is None:
                return
            await self._record(result)
            if result.number % parts.config.checkpoint.every == 0:
                await self._save(learner)
            await self._evaluate(learner)

    def _is_last(self, checkpoint: Checkpoint | None) -> bool:
        """Whether nothing is left to do after it."""
        if checkpoint is None or self._last is None or checkpoint.round < self._last:
            return False
        return not self._parts.evaluator.due(checkpoint.round)

    async def _evaluate(self, learner: LearnerProcess) -> None:
        """Measure the policy if that is due. It is saved first, so whatever is recorded can be gone back to."""
        parts = self._parts
        if parts.stop.requested or not parts.evaluator.due(self._done):
            return
        await self._save(learner)
        evaluation = None
        with parts.stop.interruptible():
            parts.view.phase("evaluate")
            evaluation = await parts.evaluator.run(learner, self._done, self._policy_step)
        if evaluation is not None:
            await parts.evaluator.keep(evaluation)

    async def _heed(self, learner: LearnerProcess) -> None:
        """Save if the operator asks for it, and wait for as long as the node is paused."""
        parts, control = self._parts, self._parts.control
        while not parts.stop.requested:
            if control.take_save():
                await self._save(learner)
            if not control.paused:
                return
            parts.view.phase("paused")
            with parts.stop.interruptible():
                await control.rest()

    async def _record(self, result: RoundResult) -> None:
        parts = self._parts
        if result.stats is not None:
            self._policy_step = result.stats.policy_step
        counts = Counts.of(parts.swarm.totals())
        record = record_of(result, self._policy_step, counts.since(self._counted), self._restarts)

        async def write() -> None:
            # It waits for the disk, which takes as long as the disk likes.
            await trio.to_thread.run_sync(parts.metrics.append, record)

        await parts.disk.write("metrics.jsonl", write)
        self._counted, self._restarts = counts, 0
        if record.engine_restarts:
            self._told_restarts[record.round] = record.engine_restarts
        self._done = parts.control.done = result.number
        parts.current.number = self._done + 1
        parts.swarm.trained(result.first_used)
        self._furthest = max(self._furthest, self._done)
        self._cursor = result.cursor
        per_kind = rewards_by_kind(result.local)
        for sink in parts.sinks:
            sink.write(record, per_kind)
        parts.view.round_finished(record, per_kind, result.local)
        self._tell_troubles(result)

    def _tell_troubles(self, result: RoundResult) -> None:
        """Say what went wrong in a round that went on all the same. Raises LearnerFailed if it keeps going wrong."""
        say = self._parts.view.message
        if result.unscored:
            say("warning", f"{result.unscored} groups of round {result.number} could not be scored and are left out")
        # A scorer that raises on prose (`raised`) has met a wrong answer; these have cost a worker.
        outcomes = Counter({k: self._parts.sandbox.outcomes[k] for k in ("timeout", "memory", "crashed")})
        if news := outcomes - self._outcomes:
            what = ", ".join(f"{count} {outcome}" for outcome, count in sorted(news.items()))
            say("warning", f"answers that ended their sandbox worker scored 0: {what}")
        self._outcomes = outcomes
        if not self._parts.config.training.train:
            return
        self._failed_updates = 0 if result.stats is not None else self._failed_updates + 1
        if self._failed_updates == MAX_FAILED_UPDATES:
            raise LearnerFailed(f"{MAX_FAILED_UPDATES} learning steps failed one after the other: {result.problem}")
        if result.stats is None:
            say("error", f"the learning step of round {result.number} failed: {result.problem}")

    async def _save(self, learner: LearnerProcess) -> None:
        """Write a checkpoint of the last finished round, unless there is one."""
        if self._done == self._saved:
            return
        parts = self._parts
        parts.view.phase("checkpoint")
        state = {
            "model": learner.description["model"],
            "policy_step": self._policy_step,
            "cursor": dict(self._cursor),
            "seed": parts.seed,
        }

        async def write() -> None:
            directory = parts.checkpoints.begin(self._done)
            try:
                await learner.save(directory)
            except BaseException:
                parts.checkpoints.discard(directory)
                raise
            # Hashing and flushing gigabytes takes seconds, in which the node must not be deaf.
            await trio.to_thread.run_sync(parts.checkpoints.commit, self._done, directory, state)

        await parts.disk.write(f"the checkpoint of round {self._done}", write)
        self._saved = parts.control.saved = self._done

    async def _checkpoint(self) -> Checkpoint | None:
        """Where to go on. Raises NothingToResumeError if there ought to be a checkpoint and none is whole."""
        parts = self._parts
        checkpoint, self._known_checkpoint = self._known_checkpoint, None
        if checkpoint is None:
            checkpoint = await trio.to_thread.run_sync(parts.checkpoints.newest)
        if checkpoint is not None:
            return checkpoint
        recorded = [record.round for record in parts.metrics.last(1)]
        if recorded and (parts.checkpoints.damaged or recorded[0] > parts.config.checkpoint.every):
            raise NothingToResumeError(
                f"{recorded[0]} rounds are recorded in {parts.data.metrics_path}, and"
                f" {parts.data.checkpoints_path} holds no whole checkpoint to go on from: restore one from a copy,"
                " start in another --data-dir, or move metrics.jsonl away to begin again from the base model"
            )
        return None

    async def _resume(self, checkpoint: Checkpoint | None) -> None:
        """Bring record, pool and task stream back to the checkpoint's round."""
        parts = self._parts
        self._done = self._saved = checkpoint.round if checkpoint else 0
        parts.control.done = parts.control.saved = self._done
        self._furthest = max(self._furthest, self._done)
        self._policy_step = checkpoint.state["policy_step"] if checkpoint else 0
        self._cursor = checkpoint.state["cursor"] if checkpoint else self._first_cursor
        parts.stream.restore(self._cursor)
        parts.current.number = self._done + 1
        # They happened, and are told by the next record if the one that told of them is dropped.
        self._restarts += sum(count for number, count in self._told_restarts.items() if number > self._done)
        self._told_restarts.clear()

        async def rewind() -> int:
            # Only now is it known that this configuration runs; `eval` and its like go by the file.
            parts.data.write_config(parts.config)
            parts.pool.rewind(self._done)
            await trio.to_thread.run_sync(parts.evaluator.rewind, self._done)
            return await trio.to_thread.run_sync(parts.metrics.rewind, self._done)

        again = await parts.disk.write("the return to the checkpoint", rewind)
        if checkpoint:
            parts.view.message("info", f"resuming after round {self._done} from {checkpoint.path}")
        if lost := await trio.to_thread.run_sync(parts.metrics.missing, self._done):
            parts.view.message("warning", f"{lost} of rounds 1 to {self._done} are not in metrics.jsonl: it was cut")
        if again:
            parts.view.message("warning", f"{again} rounds after round {self._done} have no checkpoint: done again")

    def _introduce(self, learner: LearnerProcess) -> None:
        parts, about = self._parts, learner.description
        parts.view.started(
            NodeInfo(
                node_id=parts.identity.node_id,
                name=parts.config.node.name,
                model=about["model"],
                device=about["device"],
                engine=about["engine"],
                data_dir=str(parts.data.path),
                done=self._done,
                rounds=self._last,
            )
        )
        if not parts.config.training.train:
            parts.view.message("info", "this node samples and shares, and does not learn ([training] train is false)")
        asked = recipe_of(parts.config.model.name, parts.config.model.device)
        found = recipe_of(about["model"])
        if asked is not None and found != asked:
            parts.view.message(
                "warning",
                f"the settings in force are those recommended for {asked}, and the model turned out to be"
                f" {about['model']}: name it in [model] name to get its own",
            )
