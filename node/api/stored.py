"""What the data directory holds, read for a request in a thread of its own: rollouts of the pool, and evaluations."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from node.api.models import Evaluations, Rollout, Rollouts, RolloutsQuery, Sample
from node.evaluations import EvaluationRecord
from rl.rollouts import ScoredGroup
from verifiers.codec import unpack

MAX_TEXT = 4000
"""Characters of a prompt or a completion that are shown."""

MAX_ANSWER = 2**20
"""Characters of all texts in one answer; one group is always shown."""

MAX_EVALUATIONS = 2000
MAX_EVALUATIONS_BYTES = 2**21
"""Of the file's end."""

_GROUP = TypeAdapter(ScoredGroup)


def rollouts(pool: Path, query: RolloutsQuery) -> Rollouts:
    """Groups of the pool. Raises sqlite3.Error if it cannot be read just now."""
    found: list[Rollout] = []
    size = 0
    if not pool.exists():
        return Rollouts(rollouts=found)  # a relay
    with closing(sqlite3.connect(f"{pool.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        rows = connection.execute(
            "SELECT id, round, origin, external, kind, usable, body,"
            " (SELECT json_group_array(draws.round) FROM draws WHERE draws.id = groups.id) FROM groups"
            " WHERE (?1 IS NULL OR id < ?1) AND (?2 IS NULL OR external = ?2) AND (?3 IS NULL OR kind = ?3)"
            " ORDER BY id DESC LIMIT ?4",
            (query.before, {"all": None, "own": 0, "others": 1}[query.origin], query.kind, query.limit),
        )
        for row in rows:
            rollout = _rollout(*row)
            size += len(rollout.prompt) + sum(len(sample.text) for sample in rollout.completions)
            if found and size > MAX_ANSWER:
                break
            found.append(rollout)
    return Rollouts(rollouts=found)


def _rollout(
    key: int, number: int, origin: str, external: int, kind: str, usable: int, body: bytes, draws: str
) -> Rollout:
    scored = _GROUP.validate_python(unpack(body))
    task = scored.group.task
    return Rollout(
        id=key,
        round=number,
        origin=origin,
        own=not external,
        kind=kind,
        prompt=task.prompt[:MAX_TEXT],
        prompt_cut=len(task.prompt) > MAX_TEXT,
        policy_step=scored.group.policy_step,
        reward=scored.mean_reward,
        informative=scored.informative,
        used_in=sorted(json.loads(draws)),
        refused=not usable,
        completions=[
            Sample(
                text=completion.text[:MAX_TEXT],
                cut=len(completion.text) > MAX_TEXT,
                finished=completion.finished,
                reward=reward,
                advantage=advantage,
            )
            for completion, reward, advantage in zip(
                scored.group.completions, scored.rewards, scored.advantages, strict=True
            )
        ],
    )


def evaluations(path: Path) -> Evaluations:
    """The newest lines of `evaluations.jsonl`; none without the file. Raises OSError."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            begin = max(0, end - MAX_EVALUATIONS_BYTES)
            file.seek(begin)
            data = file.read(MAX_EVALUATIONS_BYTES)
    except FileNotFoundError:
        return Evaluations(evaluations=[])
    lines = data.split(b"\n")[1 if begin else 0 : -1]
    read = [_evaluation(line) for line in lines[-MAX_EVALUATIONS:]]
    return Evaluations(evaluations=[value for value in read if value is not None])


def _evaluation(line: bytes) -> EvaluationRecord | None:
    """None for a line that no node wrote: here the others are only shown."""
    try:
        return EvaluationRecord.model_validate_json(line)
    except ValidationError:
        return None
