"""What a node is made of, and what follows from it for its rounds."""

from dataclasses import dataclass, field

from node.api.control import Control
from node.api.current import CurrentLearner
from node.config import Config
from node.datadir import DataDir
from node.disk import Disk
from node.exchange import CurrentRound, Network
from node.identity import Identity
from node.measuring import Evaluator
from node.record import MetricsFile
from node.sinks import Sink
from node.stop import Stop
from node.view import View
from rl.checkpoint import Checkpoint, CheckpointStore
from rl.pool import SqlitePool
from rl.rollouts import Sampling
from rl.sapo import RoundPlan
from verifiers.sandbox import Sandbox
from verifiers.stream import TaskStream


@dataclass(frozen=True)
class Parts:
    """What a node is made of, wired once. Only the learner is replaced during its life.

    `checkpoint` is the newest good one, if whoever wired this has looked already: finding it reads all of it. `current`
    is kept at the round in hand, `policy` is lent the learner while it trains, and `control` is heeded between rounds.
    """

    config: Config
    data: DataDir
    identity: Identity
    sandbox: Sandbox
    stream: TaskStream
    pool: SqlitePool
    swarm: Network
    metrics: MetricsFile
    checkpoints: CheckpointStore
    evaluator: Evaluator
    sinks: list[Sink]
    view: View
    stop: Stop
    disk: Disk
    seed: int
    checkpoint: Checkpoint | None = None
    current: CurrentRound = field(default_factory=CurrentRound)
    policy: CurrentLearner = field(default_factory=CurrentLearner)
    control: Control = field(default_factory=Control)


def plan_of(parts: Parts) -> RoundPlan:
    """What each round does, as the settings have it."""
    sampling, sharing = parts.config.sampling, parts.config.sharing
    local, external = sharing.places
    return RoundPlan(
        origin=parts.identity.node_id,
        local=local,
        external=external,
        share=sharing.share,
        max_age=sharing.max_age,
        reuse=sharing.reuse,
        per_peer=sharing.per_peer,
        sampling=Sampling(
            samples=sampling.group_size,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        ),
        advantage=parts.config.training.advantage,
        seed=parts.seed,
        train=parts.config.training.train,
        overlap=parts.config.training.overlap,
    )
