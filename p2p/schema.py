"""What stands in a batch on the wire, key by key, in the order in which it is written (docs/protocol.md).

Nothing is converted: a value of another type, a key too many or too few, or a length out of bounds is refused.
"""

import math
import struct
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from p2p.ids import KEY_BYTES
from p2p.settings import SwarmName
from rl.rollouts import MAX_GROUP, MIN_GROUP
from verifiers.base import MAX_SEED

MAX_GROUPS = 64
"""Groups in a batch. A bigger round is several batches."""

MAX_COMPLETIONS = 1024
"""Completions in a batch, over all its groups."""

MAX_TEXT = 2**18
"""Characters (Unicode code points, as everywhere here) in a completion; it is what a sandbox takes at most."""

MAX_PROMPT = 2**16
"""Characters in a prompt."""

MAX_CONFIG = 4096
"""Characters in a task's configuration."""

MAX_NAME = 128
"""Characters in the name of a verifier, of its version, of a model."""

MAX_LOGPROBS = 2**16
"""Log-probs in a batch, over all its completions: four bytes each."""

MAX_USES = 64
"""Nodes of whose groups a batch tells what became of them."""

MAX_DEPTH = 5
"""Maps and arrays inside each other: batch, groups, group, completions, completion."""

_BATCH, _GROUP, _COMPLETION, _USE = 1 + 2 * 7, 1 + 2 * 4 + 2 * 5, 1 + 2 * 3, 1 + 2 * 3
MAX_VALUES = _BATCH + MAX_GROUPS * _GROUP + MAX_COMPLETIONS * _COMPLETION + MAX_USES * _USE
"""Values in the largest batch, keys counted."""

Number = Annotated[int, Field(ge=0, le=MAX_SEED)]
"""Fits a signed 64-bit integer."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class CompletionBody(_Body):
    """One answer: `finished` unless cut at the token limit; `logprobs` are big-endian float32, one a token, or nil."""

    text: Annotated[str, Field(max_length=MAX_TEXT)]
    finished: bool
    logprobs: Annotated[bytes, Field(max_length=4 * MAX_LOGPROBS)] | None


class TaskBody(_Body):
    """A task reference; `config` is canonical JSON."""

    verifier: Name
    version: Name
    config: Annotated[str, Field(max_length=MAX_CONFIG)]
    seed: Number
    index: Number


class GroupBody(_Body):
    """A task, the prompt that its maker saw, the policy's step count, and the answers."""

    task: TaskBody
    prompt: Annotated[str, Field(max_length=MAX_PROMPT)]
    step: Number
    completions: Annotated[list[CompletionBody], Field(min_length=MIN_GROUP, max_length=MAX_GROUP)]


class UseBody(_Body):
    """Of the node with this public key, how many groups the sender has admitted and trained on, since it knows it."""

    key: Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    admitted: Number
    trained: Number


class BatchBody(_Body):
    """A round of a node, or a part of one. `time` is in milliseconds since 1970."""

    swarm: SwarmName
    seq: Number
    time: Number
    round: Number
    model: Name
    groups: Annotated[list[GroupBody], Field(min_length=1, max_length=MAX_GROUPS)]
    uses: Annotated[list[UseBody], Field(max_length=MAX_USES)]


def check_totals(body: BatchBody) -> None:
    """Raises ValueError for too much in a batch as a whole, for log-probs that are no finite numbers, and for uses
    that are not in order.
    """
    keys = [use.key for use in body.uses]
    if keys != sorted(set(keys)):
        raise ValueError("uses that do not stand in the order of their keys, each once")
    answers = [completion for group in body.groups for completion in group.completions]
    if len(answers) > MAX_COMPLETIONS:
        raise ValueError(f"{len(answers)} completions, {MAX_COMPLETIONS} are allowed in a batch")
    told = [answer.logprobs for answer in answers if answer.logprobs is not None]
    if sum(map(len, told)) > 4 * MAX_LOGPROBS:
        raise ValueError(f"more than {MAX_LOGPROBS} log-probs in a batch")
    for logprobs in told:
        if len(logprobs) % 4:
            raise ValueError(f"{len(logprobs)} bytes of log-probs are no whole numbers of four bytes")
        if not all(map(math.isfinite, unpack_logprobs(logprobs))):
            raise ValueError("a log-prob that is not finite")


def pack_logprobs(values: tuple[float, ...]) -> bytes:
    """Log-probs as they are written. Raises OverflowError for one that no float32 holds."""
    return struct.pack(f">{len(values)}f", *values)


def unpack_logprobs(data: bytes) -> tuple[float, ...]:
    """Log-probs as numbers; `data` has a multiple of four bytes."""
    return struct.unpack(f">{len(data) // 4}f", data)
