"""The current policy of a data directory, in this process: for `eval`, `chat` and `export`, while a node may run."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from node.config import Config
from node.config_sources import Loaded
from node.datadir import DataDir
from node.errors import NodeError
from node.evaluations import EvaluationsFile, best_first
from rl.checkpoint import Checkpoint, CheckpointReader
from rl.engines import guard
from rl.errors import CheckpointError

if TYPE_CHECKING:
    from rl.learner import Learner

_TRIES = 3
"""A running node prunes checkpoints; one may go between being found and being read."""


@dataclass(frozen=True)
class CurrentPolicy:
    """A loaded learner. `checkpoint` is None if nothing has been saved yet: the policy is then the base model."""

    learner: "Learner"
    checkpoint: Checkpoint | None


def checkpoints_of(config: Config) -> CheckpointReader:
    """The checkpoints in the data directory."""
    return CheckpointReader(DataDir(config.node.data_dir).checkpoints_path)


def check_run(loaded: Loaded) -> None:
    """Say on stderr if there is nothing but the base model to be had.

    Raises DataDirError if no node has run in the data directory and no flag names a model: then the directory is
    probably mistyped, and an answer of the base model would pass for that of the policy.
    """
    data = DataDir(loaded.config.node.data_dir)
    named = any(s.path == ("model", "name") and s.source.kind == "flag" for s in loaded.settings())
    if not data.holds_run and not named:
        raise data.never_used()
    if not CheckpointReader(data.checkpoints_path).rounds():
        print(f"nothing trained in {data.path} yet: this is the base model", file=sys.stderr)


def newest(config: Config) -> Checkpoint | None:
    """The newest good checkpoint, if there is one."""
    return checkpoints_of(config).newest()


def best(config: Config) -> Checkpoint:
    """The checkpoint that was best on held-out tasks while training. Raises NodeError if there is none."""
    data = DataDir(config.node.data_dir)
    ranked = best_first(EvaluationsFile(data.evaluations_path).read())
    checkpoint = checkpoints_of(config).first(ranked)
    if checkpoint is None:
        problem = f"none of the checkpoints that were measured is left in {data.checkpoints_path}"
        if not ranked:
            problem = f"no policy has been measured yet while training in {data.path} ([evaluation] every)"
        raise NodeError(f"{problem}; leave --best out to take the newest checkpoint")
    return checkpoint


@contextmanager
def open_policy(
    config: Config, find: Callable[[Config], Checkpoint | None] = newest, *, base: bool = False
) -> Iterator[CurrentPolicy]:
    """The policy of the checkpoint that `find` gives, and what it holds until the block is left. `base` loads none.

    Raises ModelError, or CheckpointError if it fits other settings.
    """
    checkpoint = None if base else find(config)
    # Takes seconds; what is wrong before this is said at once.
    from transformers.utils import logging as transformers_logging

    from rl.learner import Learner

    guard.announce(os.environ)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    settings = config.learner_settings()
    # Nothing is trained here, so the other ranks would be started for nothing.
    alone = settings.model_copy(update={"training": settings.training.model_copy(update={"ranks": 1})})
    learner = Learner(alone, checkpoint.state["model"] if checkpoint else None)
    with closing(learner):
        for left in reversed(range(_TRIES)):
            if checkpoint is None:
                break
            try:
                learner.load(checkpoint.path)
                break
            except CheckpointError as error:
                if checkpoint.path.exists():
                    raise
                if left == 0:
                    raise NodeError(
                        f"{checkpoint.path} has gone meanwhile: a running node keeps its newest checkpoints alone"
                        " ([checkpoint] keep); copy one first, or pause the node"
                    ) from error
                checkpoint = find(config)
        yield CurrentPolicy(learner, checkpoint)
