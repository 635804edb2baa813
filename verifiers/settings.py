"""The settings of tasks and verifiers. `node.config` puts them into the tree of the whole node."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class MixEntry(BaseModel):
    """[[tasks.mix]]: one kind of task and how often it is drawn."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    verifier: str = "reasoning_gym"
    """`reasoning_gym`, `exact`, `math`, `command`, or a verifier that another package registered."""

    weight: float = Field(default=1.0, gt=0, le=1e6)
    """How often it is drawn, relative to the others."""

    config: dict[str, Any]
    """What the verifier makes of it; for `reasoning_gym` `dataset` and any option of that data set."""


class CommandSettings(BaseModel):
    """[verifiers.commands.NAME]: an external program that makes and scores tasks (`docs/verifiers.md`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    argv: list[str] = Field(min_length=1)
    """The program and its arguments, for example the python of another virtual environment and a script."""

    version: str = "1"
    """Part of every task's reference: nodes share tasks of one version only."""


class VerifierSettings(BaseModel):
    """[verifiers]: how answers are checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    workers: int = Field(default=1, ge=1, le=64)
    """Sandbox processes."""

    answer_seconds: float = Field(default=5.0, gt=0, le=3600)
    """Wall-clock limit for scoring one answer, or making one task; past it the process is killed and the answer
    scores 0."""

    memory_mb: int = Field(default=2048, ge=512, le=2**24)
    """Address space a sandbox process may take."""

    graded: bool = False
    """False: a reward is 1 for a right answer and 0 for any other, as in the paper. True: the verifier's partial
    score counts."""

    commands: dict[str, CommandSettings] = {}
    """External programs by name; `verifier = "command"` and `config.name = NAME` in a mix entry uses one."""

    options: dict[str, dict[str, Any]] = {}
    """Keyword arguments for a verifier's constructor, by its name."""
