"""Two policies on the same held-out tasks: `swarmnode eval --against`.

Since both answer the same tasks, the error of their difference is that of its values task by task, which is smaller
than what the errors of the two accuracies add up to.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio
from pydantic import BaseModel, ConfigDict

from node.config import Config
from node.config_sources import load_run
from node.datadir import DataDir
from node.errors import NodeError
from node.evaluation import Accuracy, ModelScore, Progress, Rewards, accuracy, held_out, model_score, ruled, scores
from node.policy import newest, open_policy
from rl.checkpoint import MANIFEST, POLICY, Checkpoint, CheckpointReader
from rl.errors import CheckpointError
from rl.settings import LoraSettings
from verifiers.sandbox import open_sandbox

BASE = "base"
Find = Callable[[Config], Checkpoint | None]


class Standing(BaseModel):
    """One kind of task. `difference` is that of policy and other, task by task, with its standard error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    tasks: int
    policy: ModelScore
    other: ModelScore
    difference: ModelScore


class Versus(BaseModel):
    """What `swarmnode eval --against --json` prints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: float
    policy: str
    other: str
    samples: int
    kinds: list[Standing]
    overall: Standing


@dataclass(frozen=True)
class Opponent:
    """Another policy. `config` is what it runs with; `base` is the model as it is, without any checkpoint."""

    name: str
    config: Config
    find: Find
    base: bool = False

    @classmethod
    def at(cls, path: Path, config: Config) -> "Opponent":
        """What is in a directory: a node's data, one checkpoint, or an exported (merged) model.

        It runs on this machine as `config` says. Raises NodeError if it is none of them, CheckpointError if it is
        damaged.
        """
        if (path / MANIFEST).is_file():
            return cls._checkpoint(path, config)
        data = DataDir(path.absolute())
        if data.holds_run:
            theirs = load_run(data.config_path).config if data.config_path.is_file() else config
            kept = {"model": theirs.model, "lora": theirs.lora, "prompt": theirs.prompt}
            # Where checkpoints are looked for.
            kept |= {"node": config.node.model_copy(update={"data_dir": data.path})}
            return cls(str(path), config.model_copy(update=kept), _some)
        if (path / "config.json").is_file():
            model = config.model.model_copy(update={"name": str(path.absolute()), "revision": None})
            lora = config.lora.model_copy(update={"targets": "all-linear"})
            return cls(str(path), config.model_copy(update={"model": model, "lora": lora}), newest, base=True)
        if (path / "adapter_config.json").is_file():
            raise NodeError(f"{path} is an adapter alone: give a checkpoint, a data directory or a merged model")
        what = "holds nothing to compare with" if path.exists() else "does not exist"
        raise NodeError(
            f"{path} {what}: --against takes `base`, a data directory, a directory in"
            " checkpoints/, or a model that `swarmnode export` wrote"
        )

    @classmethod
    def _checkpoint(cls, path: Path, config: Config) -> "Opponent":
        checkpoint = CheckpointReader.at(path)
        try:
            policy = json.loads((path / POLICY).read_bytes())
            lora, name = LoraSettings.model_validate(policy["lora"]), str(policy["model"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{path / POLICY} says nothing of a policy: {error}") from error
        kept = {"lora": lora, "model": config.model.model_copy(update={"name": name})}
        return cls(str(path), config.model_copy(update=kept), lambda _: checkpoint)


def versus(config: Config, against: str, find: Find, progress: Progress) -> Versus:
    """Measure the policy that `find` gives and the one that `against` names, `base` or a directory.

    Raises NodeError if one of them is not there, VerifierError or LearnerError if they cannot be measured.
    """
    opponent = None if against == BASE else Opponent.at(Path(against).expanduser(), config)
    if find(config) is None:
        raise NodeError(f"nothing has been trained in {config.node.data_dir} yet: there is no policy to compare")
    return trio.run(_versus, config, opponent, find, progress)


async def _versus(config: Config, opponent: Opponent | None, find: Find, progress: Progress) -> Versus:
    async with open_sandbox(config.verifiers, [config.node.data_dir]) as sandbox:
        kinds, tasks = await held_out(sandbox, config, progress)
        with open_policy(config, find) as current:
            name = _name(current.learner.describe()["model"], current.checkpoint)
            policy = await scores("policy", False, tasks, sandbox, config, current, progress)
            other_name, other = "base", policy
            if opponent is None:
                other = await scores("base model", True, tasks, sandbox, config, current, progress)
        if opponent is not None:
            with open_policy(opponent.config, opponent.find, base=opponent.base) as current:
                other_name = f"{opponent.name} ({_name(current.learner.describe()['model'], current.checkpoint)})"
                other = await scores("other", opponent.base, tasks, sandbox, config, current, progress)
    places = {kind: [place for place, task in enumerate(tasks) if task.kind == kind] for kind in kinds}
    return Versus(
        time=time.time(),
        policy=name,
        other=other_name,
        samples=config.evaluation.samples,
        kinds=[standing(kind, where, policy, other) for kind, where in places.items() if where],
        overall=standing("all", range(len(tasks)), policy, other),
    )


def standing(
    kind: str, places: Sequence[int], policy: tuple[Rewards, Rewards], other: tuple[Rewards, Rewards]
) -> Standing:
    """How two stand to each other on the tasks at these places, of which there is at least one."""
    greedy, sampled = (
        accuracy([statistics.fmean(mine[place]) - statistics.fmean(theirs[place]) for place in places])
        for mine, theirs in zip(policy, other, strict=True)
    )
    return Standing(
        kind=kind,
        tasks=len(places),
        policy=model_score(policy, places),
        other=model_score(other, places),
        difference=ModelScore(greedy=greedy, sampled=sampled),
    )


def lines_of(result: Versus) -> list[str]:
    """The result as lines of text, in percent with standard errors."""
    head = ["task", "tasks"]
    for way in ("greedy", "sampled"):
        head += [f"policy {way}", f"other {way}", "difference"]
    rows = [head]
    for row in (*result.kinds, result.overall):
        cells = [row.policy.greedy, row.other.greedy, row.difference.greedy]
        cells += [row.policy.sampled, row.other.sampled, row.difference.sampled]
        rows.append([row.kind, str(row.tasks), *(_cell(cell, place % 3 == 2) for place, cell in enumerate(cells))])
    return [
        f"policy: {result.policy}",
        f"other:  {result.other}",
        f"held-out accuracy in percent with its standard error, {result.samples} samples a task; paired differences",
        "",
        *ruled(rows),
    ]


def _cell(value: Accuracy, signed: bool) -> str:
    error = f" ± {100 * value.error:.1f}" if value.error is not None else ""
    return f"{100 * value.mean:{'+' if signed else ''}.1f}{error}"


def _some(config: Config) -> Checkpoint:
    checkpoint = newest(config)
    if checkpoint is None:
        raise NodeError(f"{config.node.data_dir} holds no whole checkpoint to compare with")
    return checkpoint


def _name(model: str, checkpoint: Checkpoint | None) -> str:
    return f"{model} after round {checkpoint.round}" if checkpoint else model
