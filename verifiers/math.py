r"""Questions with mathematical answers from a local file, compared by meaning: 1/2, 0.5, \frac{1}{2} are one answer."""

from typing import Any

from math_verify import parse, verify

from verifiers.base import Task
from verifiers.datasets import Exact, normal

_BOXED = "\\boxed{"


class Math(Exact):
    r"""The verifier `math`: like `exact`, with answers in LaTeX or plain notation and compared by math-verify.

    A model may give its answer in a `\boxed{...}`; the last one counts.
    """

    name = "math"

    def score(self, task: Task, answer: str) -> float:
        """1 or 0."""
        assert task.answer is not None
        given, gold = boxed(answer), boxed(task.answer)
        if normal(given) == normal(gold):
            return 1.0
        expected = _read(gold)
        # SymPy's time limits use signals; this process has the sandbox's clock instead.
        return float(any(verify(expected, reading, timeout_seconds=None) for reading in _readings(given)))


def boxed(text: str) -> str:
    r"""What stands in the last `\boxed{...}`, or the whole text if there is none that closes."""
    start = text.rfind(_BOXED)
    if start < 0:
        return text
    depth = 1
    for place in range(start + len(_BOXED), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len(_BOXED) : place]
    return text


def _readings(text: str) -> list[Any]:
    """The text as a formula, and as prose with a formula or number in it."""
    return [_read(text), parse(text, parsing_timeout=None)]


def _read(text: str) -> Any:
    return parse(text if "$" in text or "\\(" in text else f"${text}$", parsing_timeout=None)
