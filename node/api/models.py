"""What the endpoints below /api/v1 take and say. The OpenAPI document and `docs/api.md` are made from this."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from node.evaluations import EvaluationRecord
from node.record import Record
from node.snapshot import Snapshot

State = Literal["starting", "training", "sampling", "relaying", "pausing", "paused", "stopping"]


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class _Asked(BaseModel):
    """A query: unknown parameters are refused, so that a misspelt one is no silent default."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Progress(_Said):
    """How far the phase is; `total` is 0 where nobody knows."""

    done: int
    total: int
    unit: str


class Status(_Said):
    """The node at this moment."""

    version: str
    """Version of swarmnode."""
    node_id: str
    """Peer id."""
    name: str
    """Name for people; may be empty."""
    model: str | None
    """The model that is trained; null while it is being loaded."""
    device: str | None
    engine: str | None
    pid: int
    data_dir: str
    silo: bool
    """Whether the node trains alone, without a network."""
    state: State
    """`sampling` for a node that does not train, `relaying` for one without a model. `pausing` until the round in hand
    is done, `paused` after it."""
    phase: str
    """Part of the round, or `start`, `load model`, `wait for peers`, `checkpoint`, `paused`."""
    phase_seconds: float
    """How long the phase has lasted."""
    progress: Progress | None
    round: int
    """The last finished round; 0 before the first."""
    goal: int | None
    """The round after which the node ends by itself; null for none."""
    saved_round: int
    """The last round of which there is a checkpoint."""
    first_round: int | None
    """The oldest round that `/api/v1/rounds` still has."""
    reward_recent: float | None
    """Mean reward of the node's own completions over the last 50 rounds."""
    peers: int
    """Nodes connected."""
    time: float
    """Clock of the node: seconds since 1970."""


class Round(Record):
    """A line of `metrics.jsonl`, and the mean reward of each kind of task in it where that is known."""

    kinds: dict[str, float] = Field(default={})
    """Mean reward of the node's own groups, by kind of task. Known for rounds whose groups are in the pool."""


class Rounds(_Said):
    """Rounds, oldest first."""

    rounds: list[Round]


class RoundsQuery(_Asked):
    """Which rounds."""

    first: int | None = Field(default=None, alias="from", ge=1)
    """The first round wanted. Without it: the newest."""
    limit: int = Field(default=200, ge=1, le=1000)
    """At most so many."""


class Peers(_Said):
    """The swarm as the node sees it: what stands in `swarm.json`."""

    swarm: Snapshot | None
    """Null for a node that trains alone, and in the first second of any."""


class Sample(_Said):
    """One completion. `cut` says that the text was longer than is shown."""

    text: str
    cut: bool
    finished: bool
    """Whether the policy ended it; else it was cut at the token limit."""
    reward: float
    advantage: float


class Rollout(_Said):
    """A group of rollouts as it lies in the pool, with this node's own rewards."""

    id: int
    """Grows with time of arrival."""
    round: int
    """The node's round in which it was sampled, or came."""
    origin: str
    """Peer id of the node that sampled it."""
    own: bool
    kind: str
    prompt: str
    prompt_cut: bool
    policy_step: int
    """Optimiser steps of its maker's policy, as the maker says."""
    reward: float
    """Mean over its completions."""
    informative: bool
    """Whether the rewards differ."""
    used_in: list[int]
    """Rounds that trained on it; of groups of others alone."""
    refused: bool
    """Whether it is left aside: the likelihood gate refused it, or the same was there already."""
    completions: list[Sample]


class Rollouts(_Said):
    """Groups, newest first. Fewer than asked for where texts are long: go on with `before`."""

    rollouts: list[Rollout]


class RolloutsQuery(_Asked):
    """Which groups."""

    before: int | None = Field(default=None, ge=1)
    """Groups that came before the one with this id."""
    limit: int = Field(default=12, ge=1, le=50)
    """At most so many."""
    origin: Literal["all", "own", "others"] = "all"
    """Whose."""
    kind: str | None = Field(default=None, max_length=256)
    """Of this kind of task alone."""


class Forerunner(_Said):
    """A group of another node with a right answer, that was here before the node's own first success on its kind."""

    origin: str
    """Peer id of its maker."""
    round: int
    """Round in which it came."""
    trained_in: int | None
    """Round that trained on it first, if one did before the success."""


class First(_Said):
    """The first success of the node's own on a kind of task."""

    kind: str
    round: int
    time: float | None
    """Seconds since 1970; null where it is only known from the pool."""
    forerunner: Forerunner | None
    """What of others came before; a group that was trained on rather than one that was not."""


class Firsts(_Said):
    """First successes, oldest first."""

    firsts: list[First]


class LogLine(_Said):
    """A line of the node's log."""

    time: float
    level: str
    text: str


class Log(_Said):
    """The newest lines, oldest first. Secrets are masked."""

    lines: list[LogLine]


class Process(_Said):
    """A process of the node. `cpu_percent` is of one core."""

    name: Literal["node", "learner", "sandbox", "other"]
    pid: int
    memory: int
    """Bytes resident, with what it shares with others."""
    cpu_percent: float


class Resources(_Said):
    """The machine and the node's part of it. Sizes are bytes."""

    time: float
    cpus: int
    cpu_percent: float
    """Of all cores, by everybody."""
    memory_total: int
    memory_available: int
    disk_total: int
    """Of the data directory's file system."""
    disk_free: int
    processes: list[Process]


class Evaluations(_Said):
    """What was measured on held-out tasks during training (`evaluations.jsonl`), oldest first."""

    evaluations: list[EvaluationRecord]


class Settings(_Said):
    """The configuration in force; secrets are masked."""

    config: dict[str, Any]


class Done(_Said):
    """The node's state after a change was asked for. A round in hand is finished first."""

    state: State
    round: int
    saved_round: int


class SolvedTask(_Said):
    """A task of the same kind with its answer."""

    prompt: str
    answer: str


class OpenTask(_Said):
    """A task that may be answered now."""

    id: str
    """For the answers; forgotten when 16 other tasks have been handed out, and with the process."""
    kind: str
    prompt: str
    example: SolvedTask | None
    """Shows the form of an answer; null where there is none."""
    tries: int
    """Different answers that are taken."""


class Answer(_Asked):
    """An answer to a task."""

    id: str
    """Of the task."""
    answer: str
    """The text, without control characters, of at most `[admission] max_completion` characters."""


class Left(_Asked):
    """A task that is left."""

    id: str
    """Of the task."""


class Judged(_Said):
    """What an answer was worth."""

    reward: float
    """From 0 to 1, by this node's verifiers."""
    right: bool
    tries: int
    """Different answers that are left."""
    over: bool
    """Whether the task is done with: it is solved, or no tries are left."""
    shared: bool
    """Whether a group was made of its answers, for this node's pool and for others; false until it is over."""
    waiting: int
    """Groups that have not been sent yet."""


class Gone(_Said):
    """A task that was left."""

    shared: bool
    """Whether a group was made of its answers."""
    waiting: int
    """Groups that have not been sent yet."""


class Problem(_Said):
    """Why a request got no answer."""

    message: str
    type: str
    param: str | None
    code: str | None


class Failure(_Said):
    """The body of every answer that is an error."""

    error: Problem
