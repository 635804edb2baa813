"""The configuration of a node: one tree, each field followed by what it means.

Where the values come from, and which source wins, is `node.config_sources`.
"""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rl.settings import (
    EngineSettings,
    LearnerSettings,
    LoraSettings,
    ModelSettings,
    Positive,
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


def default_data_dir() -> Path:
    """`$XDG_DATA_HOME/swarmnode`, or `~/.local/share/swarmnode` where that is not set."""
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "share") / "swarmnode"


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


class NodeSettings(Section):
    """[node]: this node itself."""

    name: str = Field(default="", max_length=64)
    """A name for people, shown beside the node's id."""

    data_dir: Annotated[Path, AfterValidator(_absolute)] = Field(
        default_factory=lambda: default_data_dir(),
        json_schema_extra={"shown": "$XDG_DATA_HOME/swarmnode, else ~/.local/share/swarmnode"},
    )
    """Where identity, checkpoints, pool and metrics are kept. One node a directory."""

    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    """Fixes tasks and sampling, to repeat a run. Not set: they follow from the node's identity."""

    threads: int = Field(default=0, ge=0)
    """CPU threads of the learner; 0 leaves the choice to torch."""


class TaskSettings(Section):
    """[tasks]: what this node trains on."""

    mix: list[MixEntry] = Field(
        default=[MixEntry(config={"dataset": dataset}) for dataset in PAPER_TASKS], min_length=1
    )
    """Kinds of task and how often each is drawn. The list is replaced as a whole, not merged."""


class SharingSettings(Section):
    """[sharing]: what a round is made of. This version trains alone: every group is the node's own."""

    silo: bool = False
    """Train alone and open no network."""

    local: int = Field(default=8, ge=1, le=4096)
    """I: groups of its own in a round."""


class CheckpointSettings(Section):
    """[checkpoint]: how often progress is saved. It is saved at shutdown too."""

    every: Positive = 10
    """Rounds between checkpoints: what a crash can lose."""

    keep: int = Field(default=3, ge=2)
    """Checkpoints kept. Two at least, so that a damaged one has another behind it."""


class EvaluationSettings(Section):
    """[evaluation]: `swarmnode eval`, on held-out tasks that no node trains on."""

    per_task: int = Field(default=32, ge=1, le=4096)
    """Held-out tasks of each kind in the mix."""

    samples: int = Field(default=4, ge=1, le=64)
    """Completions sampled a task, beside the greedy one."""


class PoolSettings(Section):
    """[pool]: the store of scored groups; the oldest go first."""

    max_groups: Positive = 4096
    """Groups kept."""


class StorageSettings(Section):
    """[storage]: the disk."""

    min_free_mb: int = Field(default=500, ge=0)
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
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    pool: PoolSettings = PoolSettings()
    storage: StorageSettings = StorageSettings()
    log: LogSettings = LogSettings()
    sinks: SinkSettings = SinkSettings()

    def learner_settings(self, seed: int | None = None) -> LearnerSettings:
        """What the learner process is told. `seed` is used where the configuration fixes none."""
        fixed = self.node.seed if self.node.seed is not None else seed
        return LearnerSettings(
            model=self.model,
            lora=self.lora,
            prompt=self.prompt,
            sampling=self.sampling,
            engine=self.engine,
            training=self.training,
            seed=fixed or 0,
            threads=self.node.threads,
        )
