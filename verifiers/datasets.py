"""Questions with exact answers from a local file.

The file is JSON lines: `{"question": "...", "answer": "..."}` on each. A configuration names the path; what travels is
the SHA-256 of the file, so nodes that hold the same file share its tasks and no peer can make this node open a path.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verifiers.base import (
    MAX_TEXT,
    Example,
    Task,
    TaskRef,
    UnknownTask,
    VerifierError,
    canonical_json,
    is_held_out,
    is_text,
)

_EXAMPLE_TRIES = 20

_FEISTEL_ROUNDS = 6
"""Four make a permutation that looks random; the others even out those of small files."""


class Exact:
    """The verifier `exact`: an answer is right if it is the file's answer up to case and white space."""

    name = "exact"
    version = "1"

    def __init__(self) -> None:
        self._files: dict[str, _Questions] = {}

    def canonical(self, config: Mapping[str, Any]) -> str:
        """Reads the file of `{"path": ...}` and returns its digest, by which it is known from then on.

        Raises VerifierError that names file and line if the file cannot be read or is not what it should be.
        """
        if set(config) == {"sha256"} and config["sha256"] in self._files:
            return canonical_json(config)
        path = config.get("path")
        if set(config) != {"path"} or not isinstance(path, str):
            raise VerifierError(f'a task of {self.name!r} takes one option, path = "/path/to/questions.jsonl"')
        file = Path(path).expanduser()
        if not file.is_absolute():
            raise VerifierError(f"{path}: give the path in full; the sandbox has a working directory of its own")
        questions = _Questions.read(file)
        self._files[questions.digest] = questions
        return canonical_json({"sha256": questions.digest})

    def make(self, ref: TaskRef) -> Task:
        """Question number `index` of an endless sequence: the whole file, shuffled anew each time it is through."""
        if ref.version != self.version:
            raise UnknownTask(f"made with version {ref.version} of {self.name!r}, this node has {self.version}")
        questions = self._known(ref)
        epoch, place = divmod(ref.index, len(questions.pairs))
        question, answer = questions.pairs[_shuffled(f"{ref.seed}:{epoch}", place, len(questions.pairs))]
        return Task(ref, questions.kind, question, answer, questions.example(question))

    def score(self, task: Task, answer: str) -> float:
        """1 or 0."""
        assert task.answer is not None
        return float(normal(answer) == normal(task.answer))

    def _known(self, ref: TaskRef) -> "_Questions":
        for digest, questions in self._files.items():
            if ref.config == canonical_json({"sha256": digest}):
                return questions
        raise UnknownTask(f"no file of this node's task mix is {ref.config}")


class _Questions:
    """What a file holds, and what it is called in tables: its name without the ending."""

    def __init__(self, digest: str, kind: str, pairs: list[tuple[str, str]]) -> None:
        self.digest = digest
        self.kind = kind
        self.pairs = pairs

    @classmethod
    def read(cls, file: Path) -> "_Questions":
        try:
            data = file.read_bytes()
        except OSError as error:
            raise VerifierError(f"{file} cannot be read: {error.strerror}") from error
        pairs = [
            _pair(file, number, line) for number, line in enumerate(data.splitlines(), 1) if line and not line.isspace()
        ]
        if not pairs:
            raise VerifierError(f"{file} has no questions in it")
        return cls(hashlib.sha256(data).hexdigest(), file.stem, pairs)

    def example(self, question: str) -> Example | None:
        """The first question of the file that may be shown beside this one."""
        for other, answer in self.pairs[:_EXAMPLE_TRIES]:
            if other != question and not is_held_out(other):
                return Example(other, answer)
        return None


def _pair(file: Path, number: int, line: bytes) -> tuple[str, str]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise VerifierError(f"{file}, line {number}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise VerifierError(f"{file}, line {number}: not a JSON object")
    for key in ("question", "answer"):
        text = value.get(key)
        if not is_text(text) or not text.strip():
            raise VerifierError(f'{file}, line {number}: "{key}" has to be text that is not empty')
        if len(text) > MAX_TEXT:
            raise VerifierError(f'{file}, line {number}: "{key}" has more than {MAX_TEXT} characters')
    return value["question"], value["answer"]


def _shuffled(key: str, place: int, count: int) -> int:
    """Where `place` goes in the shuffle of `count` things that `key` names, without making the rest of the shuffle.

    A peer chooses the key, so neither time nor memory may grow with `count`. A Feistel network (Luby and Rackoff, 1988)
    permutes the numbers of an even count of bits, fewer than four times `count`; one that comes out too large goes in
    again, until one fits (Black and Rogaway, 2002).
    """
    bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    while True:
        left, right = place >> bits, place & mask
        for number in range(_FEISTEL_ROUNDS):
            digest = hashlib.sha256(f"{key}:{number}:{right}".encode()).digest()
            left, right = right, left ^ int.from_bytes(digest[:8], "big") & mask
        place = left << bits | right
        if place < count:
            return place


def normal(text: str) -> str:
    """`text` without differences that do not matter: case, and white space at the ends or repeated."""
    return " ".join(text.casefold().split())
