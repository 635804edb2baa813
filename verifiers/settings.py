"""The settings of tasks and verifiers. `node.config` puts them into the tree of the whole node."""

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

NEEDS = ("network", "devices", "everything")
"""What [verifiers.commands.NAME] needs may name, beside paths."""

WRITE = "write:"


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

    needs: list[str] = []
    """What it may use beyond its own files, the system's libraries and a folder for temporary files: `network`,
    `devices` (a GPU), full paths of files or folders to read, `write:` and such a path, or `everything`, which confines
    it in nothing."""

    version: str = "1"
    """Part of every task's reference: nodes share tasks of one version only."""

    @field_validator("needs")
    @classmethod
    def _known(cls, needs: list[str]) -> list[str]:
        for need in needs:
            path = need.removeprefix(WRITE)
            if need not in NEEDS and not os.path.isabs(os.path.expanduser(path)):
                raise ValueError(
                    f"{need!r} is none of {', '.join(NEEDS)}, nor a full path to read, nor {WRITE} and a full path"
                )
        return needs


class VerifierSettings(BaseModel):
    """[verifiers]: how answers are checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    workers: int = Field(default=1, ge=1, le=64)
    """Sandbox processes."""

    answer_seconds: float = Field(default=5.0, gt=0, le=3600)
    """Wall-clock limit for scoring one answer, or making one task; past it the process is killed and the answer
    scores 0."""

    memory_mb: int = Field(default=2048, ge=512, le=2**24)
    """Address space a sandbox process may take; of an external program each process, counting what it can write to."""

    disk_mb: int = Field(default=256, ge=1, le=2**24)
    """Size of the folder for temporary files that each external program gets, which lies in memory, and of any one file
    that it writes."""

    graded: bool = False
    """False: a reward is 1 for a right answer and 0 for any other, as in the paper. True: the verifier's partial
    score counts."""

    commands: dict[str, CommandSettings] = {}
    """External programs by name; `verifier = "command"` and `config.name = NAME` in a mix entry uses one."""

    options: dict[str, dict[str, Any]] = {}
    """Keyword arguments for a verifier's constructor, by its name."""
