"""The nouns of verification: what a task is, how it is named, and what a verifier must be able to do.

A task travels between nodes as a `TaskRef`, never as a question with an answer attached: whoever holds the reference
makes the same task again, and with it the only answer this node will ever believe.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

MAX_SEED = 2**63 - 1
"""Seeds and indices are non-negative and fit a signed 64-bit integer, so that every language can hold them."""

MAX_TEXT = 2**18
"""Characters in a prompt or an answer. No policy reads as many."""

HELD_OUT_SHARE = 10
"""One prompt in this many belongs to the held-out split."""


class VerifierError(Exception):
    """A task or a configuration that cannot be used. The message says what to change."""


class UnknownTask(VerifierError):
    """The reference names a verifier, a version, a data set or an entry that this node does not have."""


class NoSuchTask(VerifierError):
    """The reference is of this verifier's own version, which refuses it: nobody's node can have made this task."""


@dataclass(frozen=True, slots=True)
class TaskRef:
    """Enough for any node to make the same task.

    `config` is canonical JSON (see `canonical_json`), so two references to one task are equal as bytes. `version` is
    the verifier's own: a task of another version is another task.
    """

    verifier: str
    version: str
    config: str
    seed: int
    index: int

    def check_range(self) -> None:
        """Raises UnknownTask unless seed and index are from 0 to `MAX_SEED`."""
        if not (0 <= self.seed <= MAX_SEED and 0 <= self.index <= MAX_SEED):
            raise UnknownTask("seed and index must be between 0 and 2**63 - 1")


@dataclass(frozen=True, slots=True)
class Example:
    """A solved task of the same kind, which a node may show to its policy before the question (one-shot)."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Task:
    """A question that this node made itself from `ref`. `answer` never leaves the node.

    `answer` is None where many answers are right and only the scorer can tell. `kind` is the name under which a person
    looks for it in a table (for ReasoningGYM the data set).
    """

    ref: TaskRef
    kind: str
    prompt: str
    answer: str | None
    example: Example | None = None

    @property
    def held_out(self) -> bool:
        """Whether this prompt is kept for evaluation. See `is_held_out`."""
        return is_held_out(self.prompt)


class Verifier(Protocol):
    """Makes tasks and scores answers. Runs inside the sandbox process, synchronously, one call at a time.

    Implementations are found through the entry-point group `swarmnode.verifiers`; the object there is called without
    arguments, or with the keyword arguments that `[verifiers.options.<name>]` of the configuration gives.
    """

    name: str
    version: str

    def canonical(self, config: Mapping[str, Any]) -> str:
        """The canonical JSON of `config`: defaults left out, keys sorted. Raises VerifierError for a bad one."""
        ...

    def make(self, ref: TaskRef) -> Task:
        """The task that `ref` names, the same on every machine.

        Raises UnknownTask if other nodes may have it, NoSuchTask if it is certain that none has (whoever sent it is
        blamed for that), or any other VerifierError.
        """
        ...

    def score(self, task: Task, answer: str) -> float:
        """A score in [0, 1] for `answer`, which is text of a stranger. 1 is right."""
        ...


def canonical_json(config: Mapping[str, Any]) -> str:
    """`config` as JSON with sorted keys, no white space and no NaN: the one spelling of it.

    Raises VerifierError if it holds something that JSON does not.
    """
    try:
        return json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise VerifierError(f"this task configuration cannot be written as JSON: {error}") from error


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out split: one in `HELD_OUT_SHARE`, by the hash of its text.

    Splitting by the text, not by the seed, keeps evaluation honest where a data set has few distinct questions: two
    streams with different seeds would meet the same ones. Every node computes the same split, so no node of a swarm
    trains on a prompt that another evaluates on.
    """
    digest = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is text that UTF-8 can hold. JSON can spell half a character, which travels nowhere."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


_OPENING, _CLOSING = "<answer>", "</answer>"


def extract_answer(completion: str) -> str:
    """The answer in a completion: what stands in its last `<answer>` tag, else the whole text, stripped.

    Takes time in proportion to the text's length, whatever is in it.
    """
    answer, place = completion, 0
    while (opened := completion.find(_OPENING, place)) >= 0:
        start = opened + len(_OPENING)
        end = completion.find(_CLOSING, start)
        if end < 0:
            break
        answer, place = completion[start:end], end + len(_CLOSING)
    return answer.strip()
