"""The record of a run: `metrics.jsonl`, one JSON object a round. `docs/metrics.md` is its reference.

The rule that keeps old runs readable: keys keep their name, their meaning and their place; a key that a later version
adds goes to the end and has a default, which stands for it in lines written before; and a reader passes over keys that
it does not know.
"""

import errno
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from node.datadir import sync_directory
from node.errors import NodeError

MAX_ROUND = 2**53
"""Every reader of JSON holds whole numbers up to here, and SQLite more."""

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(lambda value: round(value, 4))]


_LEAST = -sys.float_info.max
"""The least number that is one: a whole number can have more digits than any float."""


def _finite(value: float | None) -> float | None:
    """JSON has no NaN: what is not a number is not known."""
    return value if isinstance(value, (int, float)) and _LEAST <= value <= -_LEAST else None


Finite = Annotated[float, Field(allow_inf_nan=False)]
Measured = Annotated[float | None, BeforeValidator(_finite)]


class RecordError(NodeError):
    """`metrics.jsonl` holds something that no node wrote."""


class Record(BaseModel):
    """One finished round. The keys, their order and their meaning are stable; later versions may only add to them."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)

    round: int = Field(ge=1, le=MAX_ROUND)
    """Number of the round. The first is 1, and each is there once."""

    time: Finite
    """When the round was finished: seconds since 1970 (UTC)."""

    policy_step: Count
    """Optimiser steps the policy has taken since its base model."""

    local_groups: Count
    """Rollout groups this node sampled itself in this round."""

    external_groups: Count
    """Rollout groups of other nodes that were chosen for the update, whatever part of each is trained on."""

    reward_local: Finite
    """Mean reward of the node's own completions, from 0 to 1. Others' completions never count here."""

    reward_external: Measured
    """Mean reward, by this node's own verifiers, of the whole external groups; null if there were none."""

    informative_fraction: float = Field(ge=0, le=1)
    """Share of the local groups whose rewards differ; only those have a gradient."""

    tokens_generated: Count
    """Tokens sampled in this round, end-of-sequence tokens included."""

    seconds_generate: Seconds
    """Wall-clock time spent sampling, in seconds."""

    seconds_score: Seconds
    """Wall-clock time spent scoring, in seconds."""

    seconds_update: Seconds
    """Wall-clock time of the learning step, in seconds."""

    tokens_trained: Count
    """Completion tokens that entered the loss, once however many epochs."""

    loss: Measured
    """Mean loss over the round's optimiser steps; null if there was none."""

    clip_fraction: Measured
    """Share of the trained tokens whose probability ratio was clipped; null if no step was taken."""

    entropy: Measured
    """Mean entropy of the policy at the trained positions, in nats a token; null if no step was taken."""

    grad_norm: Measured
    """Mean norm of the gradient before clipping; null if no step was taken."""

    engine_logprob_gap: Measured
    """Mean absolute difference between the log-probs of engine and policy, in nats, on some of the tokens
    sampled; null if it was not measured."""

    peers: Count
    """Other nodes connected when the round ended."""

    batches_sent: Count
    """Batches of rollouts sent to other nodes in this round."""

    batches_received: Count
    """Batches of rollouts that came from other nodes since the round before."""

    rejected: dict[str, Count]
    """What was refused since the round before: reason, and how often."""

    seconds_share: Seconds = 0.0
    """Wall-clock time spent keeping and sending own groups and choosing external ones, in seconds."""

    engine_restarts: Count = 0
    """How often the inference engine was started anew since the round before: rebuilt, or replaced together with its
    whole process."""

    seconds_sync: Seconds = 0.0
    """Wall-clock time of handing the engine new weights, in seconds; a part of `seconds_generate`."""

    gate_refused: Count = 0
    """Rewarded completions of other nodes that the likelihood gate kept out of the update."""

    gate_threshold: Measured = None
    """The least mean log-prob with which the gate lets a completion pass, in nats a token; null if it is off, or too
    little is known to set one."""

    learning_rate: Measured = None
    """Learning rate of the round's last optimiser step; null if there was none."""


class MetricsFile:
    """`metrics.jsonl`. One process writes it (the one that holds the data directory's lock); any may read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: int | None = None

    def append(self, record: Record) -> None:
        """Add one line and make it last. On an error (a full disk) the file stays as it was.

        Raises OSError, or ValueError for a round that is not later than the last one: `rewind` first.
        """
        last = self._prepare()
        if record.round <= last:
            raise ValueError(f"round {record.round} is recorded already: the last one is {last}")
        line = record.model_dump_json().encode() + b"\n"
        with self._path.open("ab", buffering=0) as file:
            length = file.tell()
            try:
                written = file.write(line)
                if written != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
                os.fsync(file.fileno())
            except OSError:
                file.truncate(length)
                raise
        if length == 0:
            sync_directory(self._path.parent)
        self._last = record.round

    def rewind(self, last_round: int) -> int:
        """Drop the rounds after `last_round` and a torn last line. Returns how many whole rounds went.

        What follows `last_round` need not be readable, as it goes. Raises OSError, or RecordError for a damaged line
        among what is to stay.
        """
        end, last, dropped, before = 0, 0, 0, 0
        for line in self._lines():
            try:
                record = self._parse(line, before)
            except RecordError:
                if before < last_round:
                    raise
                continue
            if record is None:
                break
            before = record.round
            if record.round <= last_round:
                end, last = line.end, record.round
            else:
                dropped += 1
        self._cut(end)
        self._last = last
        return dropped

    def missing(self, last_round: int) -> int:
        """How many of the rounds from 1 to `last_round` the file does not have. Raises RecordError."""
        return last_round - sum(record.round <= last_round for record in self.read())

    def read(self) -> Iterator[Record]:
        """The rounds, oldest first; none if there is no file. A torn last line, left by a crash, is passed over.

        Raises RecordError for any other line that is not a record, or that is out of order.
        """
        for _, record in self._scan():
            yield record

    def last(self, count: int) -> list[Record]:
        """The newest `count` rounds, oldest first. Raises RecordError."""
        return list(self.read())[-count:]

    def _prepare(self) -> int:
        """The last round in the file, which is brought to end after a whole line."""
        if self._last is None:
            end, last = 0, 0
            for end, record in self._scan():  # noqa: B007
                last = record.round
            self._cut(end)
            self._last = last
        return self._last

    def _cut(self, length: int) -> None:
        """Drop what stands after `length` bytes. Needs no room on the disk; a crash leaves the old end or the new."""
        if self._path.exists() and self._path.stat().st_size > length:
            os.truncate(self._path, length)

    def _scan(self) -> Iterator[tuple[int, Record]]:
        """Each record and the offset behind its line."""
        last = 0
        for line in self._lines():
            record = self._parse(line, last)
            if record is None:
                return
            last = record.round
            yield line.end, record

    def _lines(self) -> Iterator["_Line"]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        end = 0
        for number, content in enumerate(data.splitlines(keepends=True), 1):
            end += len(content)
            yield _Line(number, content, end, is_last=end == len(data))

    def _parse(self, line: "_Line", before: int) -> Record | None:
        """The record in a line; None if the line is torn. Raises RecordError.

        `before` is the round of the record before.
        """
        torn = line.is_last and not line.content.endswith(b"\n")
        try:
            record = Record.model_validate(json.loads(line.content))
        except (ValueError, RecursionError) as error:
            # The last line may be cut short, or be zeros where a machine lost power before the data was on disk.
            if torn or (line.is_last and not line.content.strip(b"\0 \n")):
                return None
            raise self._damaged(line, f"is not a record: {_first(error)}") from error
        if torn:
            return None
        if record.round <= before:
            raise self._damaged(line, f"round {record.round} stands after round {before}")
        return record

    def _damaged(self, line: "_Line", problem: str) -> RecordError:
        return RecordError(
            f"{self._path}:{line.number}: {problem}; delete that line, or move the file away to begin a new one: it is"
            " only the record, training does not depend on it"
        )


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    content: bytes
    end: int
    """Bytes from the beginning of the file up to behind this line."""
    is_last: bool


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        detail = error.errors(include_url=False)[0]
        return f"{'.'.join(str(part) for part in detail['loc'])}: {detail['msg']}"
    return str(error)
