"""Rollouts from a file into the pool of a node that does not run, through what a peer's groups have to pass."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from node.config import Config
from node.datadir import DataDir
from node.errors import NodeError
from node.identity import Identity
from node.record import MetricsFile
from node.rollouts_file import read_rows
from p2p.reasons import Reason
from p2p.verification import verify
from p2p.wire import WireGroup
from rl.advantage import advantages
from rl.pool import SqlitePool
from rl.rollouts import RolloutGroup, ScoredGroup
from verifiers.base import Task
from verifiers.sandbox import Sandbox, open_sandbox
from verifiers.stream import TaskStream

PREFIX = "import:"
"""Of the origin of imported groups, before the name they are given. No peer id looks like it."""

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass
class Outcome:
    """What became of the groups in a file. `known` were in the pool already, for `no_room` there was no room."""

    origin: str
    imported: int = 0
    informative: int = 0
    known: int = 0
    no_room: int = 0
    refused: Counter[Reason] = field(default_factory=Counter)


def origin_of(path: Path, name: str | None) -> str:
    """The origin of what is imported from `path`: of that name, else the file's. Raises NodeError for a bad name."""
    chosen = path.stem if name is None else name
    if not _NAME.fullmatch(chosen):
        raise NodeError(f"{chosen!r} cannot name an origin: give --name, of letters, digits, dots, dashes (64 at most)")
    return PREFIX + chosen


async def import_rollouts(config: Config, path: Path, origin: str) -> Outcome:
    """Check the groups in a file and keep those that pass, as having come in the node's next round.

    Raises DataDirError if a node has the data directory, PoolError, RecordError, SandboxError, VerifierError if the own
    task mix cannot be made, OSError.
    """
    outcome = Outcome(origin)
    with DataDir.open(config.node.data_dir) as data:
        own = Identity.load_or_create(data.identity_path).node_id
        last = MetricsFile(data.metrics_path).last(1)
        importer = _Importer(config, origin, last[-1].round + 1 if last else 1, outcome)
        with SqlitePool(data.pool_path, own, config.pool.max_groups, config.pool.per_peer) as pool:
            async with open_sandbox(config.verifiers, [config.node.data_dir]) as sandbox:
                # Tells the sandbox the files of questions that the mix names, and says what the mix makes.
                stream = await TaskStream.open(sandbox, config.tasks.mix, 0)
                for found in read_rows(path):
                    if isinstance(found, Reason):
                        outcome.refused[found] += 1
                    else:
                        await importer.take(found, pool, sandbox, stream)
    return outcome


class _Importer:
    def __init__(self, config: Config, origin: str, number: int, outcome: Outcome) -> None:
        self._config = config
        self._origin = origin
        self._round = number
        self._outcome = outcome

    async def take(self, group: WireGroup, pool: SqlitePool, sandbox: Sandbox, stream: TaskStream) -> None:
        """Check one group, and keep it if it passes."""
        outcome = self._outcome
        # The pool tells groups apart by reference and answers alone: kind and answer of the task do not matter yet.
        if pool.holds(RolloutGroup(Task(group.ref, "", group.prompt, None), group.completions, group.policy_step)):
            outcome.known += 1
            return
        if not pool.room_for(self._origin):
            outcome.no_room += 1
            return
        found = await verify(group, sandbox, self._config.admission.max_completion, stream.makes)
        if isinstance(found, Reason):
            outcome.refused[found] += 1
            return
        rollouts = RolloutGroup(found.task, group.completions, group.policy_step)
        earned = advantages(found.rewards, self._config.training.advantage)
        scored = ScoredGroup(rollouts, self._origin, self._round, found.rewards, earned)
        pool.add([scored])
        outcome.imported += 1
        outcome.informative += scored.informative
