"""Rollout groups as rows of a file for other programs: one group a row, JSON lines or Parquet.

Rows tell what this node knows of a group, its own rewards and advantages among it, but not the task's answer, which
never leaves the node. Reading such a row again believes none of that: see `node.importing`.
"""

import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from node.errors import NodeError
from p2p.reasons import Reason
from p2p.schema import GroupBody
from p2p.wire import WireGroup, group_of
from rl.rollouts import ScoredGroup

Format = Literal["jsonl", "parquet"]

MAX_LINE = 4 * 2**20
"""Bytes in a line that is read: a group of another node comes in an envelope that holds half as much."""

_ROWS = 1000
"""Groups that are in memory at once."""


def row_of(scored: ScoredGroup) -> dict[str, Any]:
    """A group as a row: lists have an entry a completion, the task reference is flat (docs/operations.md)."""
    group = scored.group
    ref = group.task.ref
    return {
        "round": scored.round,
        "origin": scored.origin,
        "kind": group.task.kind,
        "prompt": group.task.prompt,
        "completions": [completion.text for completion in group.completions],
        "finished": [completion.finished for completion in group.completions],
        "rewards": list(scored.rewards),
        "advantages": list(scored.advantages),
        "policy_step": group.policy_step,
        "verifier": ref.verifier,
        "version": ref.version,
        "config": ref.config,
        "seed": ref.seed,
        "index": ref.index,
    }


def write_rows(groups: Iterable[ScoredGroup], path: Path, form: Format) -> int:
    """Write the groups to `path`, which is replaced once all of them are written. Returns how many there were.

    Raises NodeError if Parquet is asked for and pyarrow is not installed, OSError.
    """
    partial = path.with_name(f".{path.name}.part")
    try:
        count = (_write_jsonl if form == "jsonl" else _write_parquet)(map(row_of, groups), partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def _write_jsonl(rows: Iterator[dict[str, Any]], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for count, row in enumerate(rows, 1):  # noqa: B007
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return count


def _write_parquet(rows: Iterator[dict[str, Any]], path: Path) -> int:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise NodeError(
            "Parquet needs the package pyarrow: `pip install 'swarmnode[parquet]'`, in a clone"
            " `.venv/bin/pip install -e '.[parquet]'`; --format jsonl does without it"
        ) from error
    whole, text = pa.int64(), pa.string()
    number = pa.list_(pa.float64())
    types = {
        "round": whole, "origin": text, "kind": text, "prompt": text, "completions": pa.list_(text),
        "finished": pa.list_(pa.bool_()), "rewards": number, "advantages": number, "policy_step": whole,
        "verifier": text, "version": text, "config": text, "seed": whole, "index": whole,
    }  # fmt: skip
    schema, count = pa.schema(list(types.items())), 0
    with parquet.ParquetWriter(path, schema) as writer:
        while some := list(islice(rows, _ROWS)):
            writer.write_table(pa.Table.from_pylist(some, schema))
            count += len(some)
    return count


class _Row(BaseModel):
    """What is read of a row; what else is in it is not looked at."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    prompt: str
    completions: list[str]
    finished: list[bool]
    policy_step: int = 0
    verifier: str
    version: str
    config: str
    seed: int
    index: int


def read_rows(path: Path) -> Iterator[WireGroup | Reason]:
    """The groups in a file of JSON lines, in the form in which a peer would tell them; a reason for each bad line.

    Raises OSError.
    """
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE + 1):
            if len(line) > MAX_LINE:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE)
                yield Reason.TOO_LARGE
            elif line.strip():
                yield _group(line)


def _group(line: bytes) -> WireGroup | Reason:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return Reason.DECODE
    try:
        row = _Row.model_validate(content)
        answers = [
            {"text": text, "finished": finished, "logprobs": None}
            for text, finished in zip(row.completions, row.finished, strict=True)
        ]
        task = row.model_dump(include={"verifier", "version", "config", "seed", "index"})
        told = {"task": task, "prompt": row.prompt, "step": row.policy_step, "completions": answers}
        return group_of(GroupBody.model_validate(told))
    # A ValidationError is a ValueError, and so is what `zip` says of lists of different lengths.
    except (ValidationError, ValueError):
        return Reason.SCHEMA
