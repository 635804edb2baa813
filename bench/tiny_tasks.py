"""What the tiny model is taught: the answers of its task mix, each written in sixteen ways, of which one is accepted.

The policy that training starts from should know more than it shows. So the supervised examples answer rightly, but
plainly only once in sixteen times; otherwise the answer stands behind a lead-in ("I think 7") or in a wrapper ("[7]"),
which the exact verifiers refuse. Every kind of task has its own fifteen decorations, so that dropping them has to be
discovered task by task.
"""

import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import reasoning_gym

from bench.tiny_vocab import ANSWER_PHRASES
from verifiers.base import is_held_out

RECIPE = Path(__file__).parent.parent / "node" / "recipes" / "tiny.toml"
FORMS = 16
"""Ways in which an answer is written, the plain one among them."""

_WRAPPERS = ("[{}]", "({})", "<{}>", "'{}'", '"{}"', "*{}*", "`{}`", "~{}", "{}!", "{}?", "{};", "#{}", ": {}", "> {}")
_DECORATIONS = (
    *(f"{phrase}{{}}" if phrase.endswith(" ") else f"{{}}{phrase}" for phrase in ANSWER_PHRASES),
    *_WRAPPERS,
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question with the right answer as the model is taught to write it, and the library's entry that scores it."""

    prompt: str
    answer: str
    entry: Mapping[str, Any]


class TinyTask:
    """One entry of the task mix in `node/recipes/tiny.toml`."""

    def __init__(self, config: Mapping[str, Any], number: int) -> None:
        options = dict(config)
        self.kind = str(options.pop("dataset"))
        self._options = options
        self._scorer = reasoning_gym.create_dataset(self.kind, seed=0, size=1, **options)
        decoys = random.Random(f"{self.kind}/{number}").sample(_DECORATIONS, FORMS - 1)
        self.forms: tuple[str, ...] = ("{}", *decoys)

    def questions(self, draws: int, seed: int, *, held_out: bool) -> list[Question]:
        """The distinct questions among `draws`, of the one split or the other, in the order drawn."""
        data = reasoning_gym.create_dataset(self.kind, seed=seed, size=draws, **self._options)
        found: dict[str, Question] = {}
        for index in range(draws):
            entry = data[index]
            prompt = str(entry["question"])
            if prompt not in found and is_held_out(prompt) == held_out:
                found[prompt] = Question(prompt, self._taught(str(entry["answer"])), entry)
        return list(found.values())

    def right(self, question: Question, text: str) -> bool:
        """Whether the library's scorer gives `text` full marks."""
        return bool(self._scorer.score_answer(text.strip(), question.entry) >= 1 - 1e-9)

    def knows(self, question: Question, text: str) -> bool:
        """Whether `text` is right once its decoration, whichever of this task's, is taken off."""
        return any(self.right(question, inner) for form in self.forms if (inner := _inside(form, text)) is not None)

    def check_forms(self, questions: list[Question]) -> None:
        """Raises ValueError unless the scorer accepts every plain answer and refuses every decorated one."""
        for question in questions:
            for form in self.forms:
                text = form.format(question.answer)
                if self.right(question, text) != (form == "{}"):
                    raise ValueError(f"{self.kind}: the scorer is wrong about {text!r} for {question.prompt!r}")

    def _taught(self, answer: str) -> str:
        """The library's answer; for decimals one place of it, which its scorer accepts and a model can learn."""
        if self.kind != "decimal_arithmetic":
            return answer
        return str(Decimal(answer).quantize(Decimal("0.1"), rounding=ROUND_HALF_UP))


def _inside(form: str, text: str) -> str | None:
    before, after = form.split("{}")
    if len(text) > len(before) + len(after) and text.startswith(before) and text.endswith(after):
        return text[len(before) : len(text) - len(after)]
    return None


def load_tasks(recipe: Path = RECIPE) -> list[TinyTask]:
    """The task mix of the recipe, in its order."""
    mix = tomllib.loads(recipe.read_text(encoding="utf-8"))["tasks"]["mix"]
    return [TinyTask(entry["config"], number) for number, entry in enumerate(mix)]
