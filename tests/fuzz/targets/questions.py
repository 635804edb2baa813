"""A file of questions and answers."""

import json

from tests.fuzz.scratch import directory
from verifiers.base import TaskRef, VerifierError
from verifiers.codec import pack
from verifiers.datasets import Exact

PATH = directory() / "questions.jsonl"


def seeds() -> list[bytes]:
    pairs = [{"question": "6 + 7?", "answer": "13"}, {"question": "größer?", "answer": "更大", "more": [1, None]}]
    lines = [json.dumps(pair).encode() for pair in pairs]
    return [b"\n".join(lines) + b"\n", lines[0], json.dumps(pairs[1], ensure_ascii=False).encode()]


def run(data: bytes) -> None:
    PATH.write_bytes(data)
    exact = Exact()
    try:
        config = exact.canonical({"path": str(PATH)})
    except VerifierError as error:
        assert str(PATH) in str(error)
        return
    for index in (0, 1, 2**63 - 1):
        task = exact.make(TaskRef("exact", "1", config, 7, index))
        assert task.answer is not None
        assert exact.score(task, task.answer) == 1.0
        example = [task.example.prompt, task.example.answer] if task.example else None
        # It goes to the node over a channel.
        pack([task.kind, task.prompt, task.answer, example])
