"""The configuration of a node: one tree, each field followed by what it means.

Where the values come from, and which source wins, is `node.config_sources`.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from node.api.settings import ApiSettings
from node.errors import ConfigError
from p2p.addresses import check_addresses, parse_address
from p2p.ids import public_key_of
from p2p.settings import AdmissionSettings, NetworkSettings
from rl.rollouts import MAX_GROUP
from rl.selection import Strategy
from rl.settings import (
    EngineSettings,
    LearnerSettings,
    LoraSettings,
    ModelSettings,
    PromptSettings,
    SamplingSettings,
    Section,
    TrainingSettings,
)
from verifiers.base import MAX_SEED
from verifiers.settings import MixEntry, VerifierSettings

PAPER_TASKS = (
    "base_conversion",
    "basic_arithmetic",
    "arc_1d",
    "bf",
    "propositional_logic",
    "fraction_simplification",
    "decimal_arithmetic",
    "calendar_arithmetic",
    "binary_matrix",
)
"""The nine ReasoningGYM data sets of the controlled experiment (arXiv 2509.08721, section 4)."""


RELAY = "none: a relay"
"""What stands for the model of a node that has none."""

MANY = 10**9
"""More than anybody needs, and little enough that no product with it overflows 64 bits."""

_LONGEST_NAME = 255
_LONGEST_PATH = 3800
"""Bytes. What a file system of Linux takes, less what the node puts below its data directory."""


def default_data_dir() -> Path:
    """`$XDG_DATA_HOME/swarmnode`, or `~/.local/share/swarmnode` where that is not an absolute path.

    Raises ConfigError if this user has no home directory.
    """
    base = Path(os.environ.get("XDG_DATA_HOME", ""))
    # The XDG Base Directory Specification has relative paths ignored.
    if base.is_absolute():
        return base / "swarmnode"
    try:
        return Path.home() / ".local" / "share" / "swarmnode"
    except RuntimeError as error:
        raise ConfigError("this user has no home directory: set HOME, or give --data-dir") from error


def data_dir_at(path: str | Path) -> Path:
    """The absolute path of a data directory. Raises ValueError if there can be none of this name."""
    text = str(path)
    if not text.strip():
        raise ValueError("must name a directory")
    if "\0" in text:
        raise ValueError("must not hold a zero byte")
    if not text.isascii() and text != text.encode(errors="replace").decode():
        raise ValueError("must be UTF-8 text")
    try:
        whole = Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"there is no home directory of the user in {Path(text).parts[0]}") from error
    name = max(whole.parts, key=lambda part: len(os.fsencode(part)))
    if len(os.fsencode(whole)) > _LONGEST_PATH or len(os.fsencode(name)) > _LONGEST_NAME:
        raise ValueError(f"is too long: at most {_LONGEST_PATH} bytes, and {_LONGEST_NAME} for each part of it")
    return whole


def _data_dir(value: Any) -> Any:
    return data_dir_at(value) if isinstance(value, (str, Path)) else value


class NodeSettings(Section):
    """[node]: this node itself."""

    name: str = Field(default="", max_length=64)
    """A name for people, shown beside the node's id."""

    data_dir: Annotated[Path, BeforeValidator(_data_dir)] = Field(
        default_factory=lambda: default_data_dir(),
        json_schema_extra={"shown": "$XDG_DATA_HOME/swarmnode, else ~/.local/share/swarmnode"},
    )
    """Where identity, checkpoints, pool and metrics are kept. One node a directory."""

    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """Fixes tasks and sampling, to repeat a run. Not set: they follow from the node's identity."""

    relay: bool = False
    """Only pass on what others send: join the swarm, forward its gossip, give it to those who missed it, relay
    connections, and be a node to begin with. No model, no rounds."""

    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of the learner; 0 leaves the choice to torch, within what a container may use."""


class TaskSettings(Section):
    """[tasks]: what this node trains on."""

    mix: list[MixEntry] = Field(
        default=[MixEntry(config={"dataset": dataset}) for dataset in PAPER_TASKS], min_length=1
    )
    """Kinds of task and how often each is drawn. The list is replaced as a whole, not merged."""


class SharingSettings(Section):
    """[sharing]: what a round is made of, and what others get of it (SAPO, arXiv 2509.08721, section 3)."""

    silo: bool = False
    """Train alone and open no network."""

    alone: int = Field(default=8, ge=1, le=4096)
    """Groups of its own in a round of a node that trains alone. The paper compares 8 of these with 4 own and 4 of
    others."""

    local: int = Field(default=4, ge=1, le=4096)
    """I: groups of its own in a round."""

    external: int = Field(default=8, ge=0, le=4096)
    """J: room for groups of other nodes in a round; see `selection`. A round that finds fewer, or none, waits for no
    more. 0 takes nothing of others, whatever `selection` says."""

    selection: Strategy = "positives"
    """What takes that room. `uniform`: J groups at random, as in the paper. `fill`: as many as make I + J whose rewards
    differ, own ones counted. `positives`: up to J x L completions that others got right, from however many groups, and
    none that they got wrong. `fill_positives`: the groups of `fill`, and of these what is right."""

    half_life: float = Field(default=0.0, ge=0, le=MANY)
    """Rounds after which a group of others is half as likely to be drawn next as one that has just come; 0 makes them
    all alike. `max_age` still holds."""

    share: Literal["all", "informative", "none"] | Annotated[float, Field(ge=0, le=1)] = "all"
    """Which own groups others get: `all`, `informative` (those whose rewards differ), `none`, or a share of them
    between 0 and 1, drawn at random. What is kept back is trained on all the same."""

    max_age: int = Field(default=20, ge=0, le=MANY)
    """Rounds of this node for which an external group is used after it came; 0 uses those of the round in hand alone.
    Old groups are answers of policies that nobody has any more."""

    per_peer: int = Field(default=2, ge=1, le=4096)
    """Groups of one other node that a round takes at most, so that none can fill this node's rounds, however much it
    sends; with `positives` so many times L completions. The share of a node's groups that the likelihood gate refuses
    is taken off. With few peers (fewer than `external` / `per_peer`) a round gets less than it has room for."""

    reuse: int = Field(default=3, ge=1, le=MANY)
    """Rounds in which one external group may be trained on."""

    @property
    def places(self) -> tuple[int, int]:
        """Own groups, and most external ones, in a round as it is run."""
        return (self.alone, 0) if self.silo else (self.local, self.external)


class CheckedNetworkSettings(NetworkSettings):
    __doc__ = NetworkSettings.__doc__

    @field_validator("listen", "announce", "join", "relay")
    @classmethod
    def _addresses(cls, value: list[str], info: ValidationInfo) -> list[str]:
        """Raises ValueError for the first address that cannot be used as it is meant."""
        try:
            check_addresses(NetworkSettings.model_validate({info.field_name: value}))
        except ValueError as error:
            raise ValueError(str(error).removeprefix(f"{info.field_name}: ")) from error
        return value

    @field_validator("allow")
    @classmethod
    def _peer_ids(cls, value: list[str]) -> list[str]:
        for peer in value:
            try:
                public_key_of(peer)
            except ValueError as error:
                raise ValueError(f"{peer!r} is not a peer id as `swarmnode id` prints it: {error}") from error
        return value

    @model_validator(mode="after")
    def _joins_are_allowed(self) -> "CheckedNetworkSettings":
        for text in self.join if self.allow else ():
            peer = parse_address(text).peer
            if peer is not None and peer not in self.allow:
                raise ValueError(f"join names {peer}, which is not in allow and would be refused: add it there")
        return self


class CheckpointSettings(Section):
    """[checkpoint]: how often progress is saved. It is saved at shutdown too."""

    every: int = Field(default=10, ge=1, le=MANY)
    """Rounds between checkpoints: what a crash can lose."""

    keep: int = Field(default=3, ge=2, le=MANY)
    """Checkpoints kept. Two at least, so that a damaged one has another behind it."""


class EvaluationSettings(Section):
    """[evaluation]: accuracy on held-out tasks that no node trains on, while training and by `swarmnode eval`."""

    every: int = Field(default=100, ge=0, le=MANY)
    """Rounds between evaluations of the policy while it trains; 0 makes none. Each samples `tasks` x (1 + L)
    completions, L being `group_size`, in which training waits. The best checkpoint is kept."""

    tasks: int = Field(default=48, ge=1, le=4096)
    """Held-out tasks of such an evaluation, shared evenly by the kinds in the mix."""

    per_task: int = Field(default=32, ge=1, le=4096)
    """Held-out tasks of each kind in the mix that `swarmnode eval` asks."""

    samples: int = Field(default=4, ge=1, le=MAX_GROUP)
    """Completions that `swarmnode eval` samples a task, beside the greedy one."""


class PoolSettings(Section):
    """[pool]: the store of scored groups, half of it for the node's own and half for those of others."""

    max_groups: int = Field(default=4096, ge=2, le=MANY)
    """Groups kept. Of the own half the oldest go first; of the other half those without anything to learn, then the
    oldest."""

    per_peer: int = Field(default=512, ge=1, le=MANY)
    """Most groups of one other node kept. Its oldest go first."""


class StorageSettings(Section):
    """[storage]: the disk."""

    min_free_mb: int = Field(default=500, ge=0, le=MANY)
    """Training pauses while the data directory's disk has less room than this, in MiB."""


class LogSettings(Section):
    """[log]: what the node says while it runs."""

    format: Literal["text", "json"] = "text"
    """`json` writes one JSON object a line to stderr, and turns the live view off."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important lines that are shown."""

    view: Literal["auto", "plain"] = "auto"
    """`auto` shows the live view where stderr is a terminal; `plain` writes log lines everywhere."""


class SinkSettings(Section):
    """[sinks]: where metrics go beside `metrics.jsonl`. Each needs the extra of its name."""

    tensorboard: bool = False
    """Event files in `<data_dir>/tensorboard`."""

    trackio: bool = False
    """Trackio, kept on this machine."""

    wandb: bool = False
    """Weights & Biases. Log in with its own `wandb login` or `WANDB_API_KEY`."""

    project: str = Field(default="swarmnode", min_length=1)
    """Project under which trackio and Weights & Biases file the run."""


class Config(Section):
    """The whole configuration."""

    node: NodeSettings = Field(default_factory=NodeSettings)
    model: ModelSettings = ModelSettings()
    lora: LoraSettings = LoraSettings()
    prompt: PromptSettings = PromptSettings()
    sampling: SamplingSettings = SamplingSettings()
    engine: EngineSettings = EngineSettings()
    training: TrainingSettings = TrainingSettings()
    tasks: TaskSettings = TaskSettings()
    verifiers: VerifierSettings = VerifierSettings()
    sharing: SharingSettings = SharingSettings()
    network: CheckedNetworkSettings = CheckedNetworkSettings()
    admission: AdmissionSettings = AdmissionSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    pool: PoolSettings = PoolSettings()
    storage: StorageSettings = StorageSettings()
    api: ApiSettings = ApiSettings()
    log: LogSettings = LogSettings()
    sinks: SinkSettings = SinkSettings()

    @model_validator(mode="after")
    def _relay_has_a_swarm(self) -> "Config":
        if self.node.relay and self.sharing.silo:
            raise ValueError("node.relay and sharing.silo exclude each other: leave one of them out")
        return self

    def learner_settings(self, seed: int | None = None) -> LearnerSettings:
        """What the learner process is told. `seed` is used where the configuration fixes none."""
        fixed = self.node.seed if self.node.seed is not None else seed
        return LearnerSettings(
            model=self.model,
            lora=self.lora,
            prompt=self.prompt,
            sampling=self.sampling,
            engine=self.engine,
            # Further ranks are for updates.
            training=self.training if self.training.train else self.training.model_copy(update={"ranks": 1}),
            seed=fixed or 0,
            threads=self.node.threads,
        )
