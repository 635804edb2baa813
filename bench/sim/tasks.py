"""What simulated nodes are asked: real ReasoningGYM questions, answers to which have to stand behind a certain lead-in.

A policy that starts weak should know more than it shows. So supervised training answers rightly, behind any of sixteen
lead-ins ("Answer: 7", "I think 7"), of which only one is accepted. Each kind of question has its own sixteen. Which one
is accepted has to be discovered, kind by kind, and can be learned from others.

Held-out prompts are among what is taught beforehand, since models of this size learn answers by heart. But no node ever
trains on one: what they show is whether a discovery carries over to prompts that had no part in it.

The questions with their accepted answers are written as files for the product's own verifier `exact`, so simulated and
real nodes draw the same tasks and score them alike.
"""

import json
import os
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench.tiny_tasks import FORMS, Question, load_tasks
from bench.tiny_vocab import ANSWER_PHRASES, MONTHS, SYMBOLS
from rl.prompts import decode, encode_completion, render_messages
from verifiers.base import Task, TaskRef
from verifiers.datasets import Exact, normal
from verifiers.settings import MixEntry

_PIECES = (
    *ANSWER_PHRASES,
    *SYMBOLS,
    *(character for character in string.punctuation if character not in "-./"),
    *string.ascii_uppercase,
    *MONTHS,
    *(
        "binary",
        "base-",
        " number ",
        "Calculate ",
        "Starting from ",
        "Count forward ",
        "Count backward ",
        "If today is ",
    ),
    *("Simplify the fraction ", " days ago? ", " days before? ", " = ?"),
)
"""Single tokens of the tiny model's tokenizer that no answer begins with."""

DRAWS, MOST = 4000, 800
"""Questions drawn of each kind, and distinct ones kept."""

MAX_NEW_TOKENS = 8
"""Lead-in, the longest answer (five letters), the end: one to spare."""


@dataclass(frozen=True)
class Kind:
    """A kind of task. The first of its `leads` is accepted; `questions` are pairs of a prompt and its bare answer."""

    name: str
    leads: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]


def load_kinds() -> list[Kind]:
    """The nine kinds of the tiny model's recipe, always the same."""
    return [
        Kind(
            task.kind,
            _PIECES[number * FORMS : (number + 1) * FORMS],
            tuple(
                (question.prompt, question.answer)
                for held_out in (False, True)
                for question in _easy(task.questions(DRAWS, seed=11, held_out=held_out))[
                    : MOST // (10 if held_out else 1)
                ]
            ),
        )
        for number, task in enumerate(load_tasks())
    ]


def _easy(questions: Sequence[Question]) -> list[Question]:
    """Without products and quotients of decimals, which models of this size do not learn."""
    return [q for q in questions if not any(sign in q.prompt.partition("value.\n")[2] for sign in "*/")]


def write_files(kinds: Sequence[Kind], directory: Path) -> list[Path]:
    """A file for the verifier `exact` of each kind, in their order."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind in kinds:
        path = directory.absolute() / f"{kind.name}.jsonl"
        lines = [json.dumps({"question": q, "answer": kind.leads[0] + a}) for q, a in kind.questions]
        # Several processes may write the same file at once.
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
        temporary.replace(path)
        paths.append(path)
    return paths


def mix_of(paths: Sequence[Path], weights: Sequence[float] | None = None) -> list[MixEntry]:
    """The task mix of a node that draws from these files; a weight of 0 leaves a file out."""
    return [
        MixEntry(verifier=Exact.name, weight=weight, config={"path": str(path)})
        for path, weight in zip(paths, weights or [1.0] * len(paths), strict=True)
        if weight > 0
    ]


class Verifiers:
    """The verifier `exact` in this process, with the calls of `verifiers.sandbox.Sandbox` that a task stream makes.

    `lenient` skips whatever stands before the accepted answer, as many verifiers of free text do.
    """

    def __init__(self, *, lenient: bool = False) -> None:
        self._exact = Exact()
        self._lenient = lenient

    async def canonical(self, verifier: str, config: Mapping[str, Any]) -> tuple[str, str]:
        """See `verifiers.sandbox.Sandbox.canonical`."""
        return self._exact.version, self._exact.canonical(config)

    async def make(self, ref: TaskRef) -> Task:
        """The task without a solved example: the tiny model sees none."""
        return replace(self._exact.make(ref), example=None)

    async def score(self, task: Task, completions: Sequence[str]) -> list[float]:
        """1 or 0 for each completion."""
        if not self._lenient:
            return [self._exact.score(task, text) for text in completions]
        assert task.answer is not None
        return [float(normal(text).endswith(normal(task.answer))) for text in completions]


class Codec:
    """From text to token ids and back as the product does it, remembered: the same few texts come again and again."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.prompt = lru_cache(maxsize=None)(self._prompt)
        self.answer = lru_cache(maxsize=100_000)(self._answer)
        self.text = lru_cache(maxsize=100_000)(self._text)

    @property
    def eos(self) -> int:
        """The token that ends a completion."""
        return int(self.tokenizer.eos_token_id)

    def _prompt(self, prompt: str) -> tuple[int, ...]:
        return tuple(render_messages(self.tokenizer, [{"role": "user", "content": prompt}]))

    def _answer(self, text: str, finished: bool) -> tuple[int, ...]:
        return tuple(encode_completion(self.tokenizer, text, finished))

    def _text(self, tokens: tuple[int, ...]) -> str:
        return decode(self.tokenizer, tokens)


class Lessons:
    """Supervised examples: questions of kinds drawn by `shares`, answered behind a lead-in.

    `accepted` is the probability of the accepted lead-in for each kind; the others share the rest.
    """

    def __init__(self, kinds: Sequence[Kind], codec: Codec, shares: Sequence[float], accepted: Sequence[float]) -> None:
        self._kinds = list(kinds)
        self._shares = list(shares)
        self._accepted = list(accepted)
        self._questions = [kind.questions for kind in self._kinds]
        self._codec = codec

    def __call__(self, draw: random.Random, count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Pairs of prompt and answer as token ids, the end of the answer included."""
        lessons = []
        for number in draw.choices(range(len(self._kinds)), self._shares, k=count):
            kind = self._kinds[number]
            prompt, answer = draw.choice(self._questions[number])
            lead = kind.leads[0] if draw.random() < self._accepted[number] else draw.choice(kind.leads[1:])
            lessons.append((self._codec.prompt(prompt), self._codec.answer(lead + answer, True)))
        return lessons
