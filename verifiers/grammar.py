"""Which answers may reach a scorer that evaluates them.

Nine ReasoningGYM data sets hand the answer to `eval` or to SymPy's `parse_expr`, which evaluates too; an answer is a
stranger's text. Each has a grammar here that holds what the task asks for and nothing that could act: numbers,
brackets, operators, the task's own variables and a list of function names. There is no attribute access, no subscript,
no text beyond the letters of the puzzle. Exponents and sizes are bounded, so reading an answer cannot run away; what
SymPy then does to simplify a legal one is for the sandbox's clock.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from verifiers.base import VerifierError

MAX_EXPRESSION = 2048
"""Characters in an expression. The longest gold answers at default options take about 150."""

MAX_DEPTH = 32
"""Brackets inside brackets."""

MAX_EXPONENT = 99

MAX_DIGITS = 10_000
"""Bound on the digits of any number that evaluating an expression may make."""

FUNCTIONS = frozenset(
    {
        *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs"),
    }
)
"""What an integral may be written with. `Integral` is not among them: it would restate the question as the answer."""


class Refused(VerifierError):
    """An answer outside the grammar. It scores 0 without meeting the scorer."""


def check(dataset: str, answer: str, metadata: Mapping[str, Any]) -> None:
    """Raises Refused unless `answer` may be given to the scorer of `dataset`. Sets that evaluate nothing pass all."""
    rule = _RULES.get(dataset)
    if rule is not None:
        rule(answer, metadata)


Rule = Callable[[str, Mapping[str, Any]], None]


def expression(text: str, names: Iterable[str] = (), functions: Iterable[str] = (), *, powers: bool = True) -> None:
    """Raises Refused unless `text` is arithmetic over numbers, `names` and calls of `functions` with one argument."""
    if len(text) > MAX_EXPRESSION:
        raise Refused(f"an expression of {len(text)} characters")
    _Expression(_tokens(text), frozenset(names), frozenset(functions), powers).check()


_TOKEN = re.compile(r"(?P<number>\d{1,20}(?:\.\d{1,20})?)|(?P<name>[A-Za-z]{1,32})|(?P<mark>\*\*|[-+*/()])", re.ASCII)
_SPACE = re.compile(r"[ \t\r\n]*")


def _tokens(text: str) -> list[str]:
    tokens = []
    place = _SPACE.match(text, 0).end()  # type: ignore[union-attr]  # matches the empty string too
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise Refused(f"{text[place]!r} has no place in an expression")
        tokens.append(match.group())
        place = _SPACE.match(text, match.end()).end()  # type: ignore[union-attr]
    return tokens


class _Expression:
    """Recursive descent. Each rule returns a bound on the decimal digits of what its part evaluates to.

    The digits of a sum, difference, product or quotient of two fractions are at most those of both together and one
    more; a power multiplies them by its exponent. A name counts as one digit, because names can cancel.
    """

    def __init__(self, tokens: list[str], names: frozenset[str], functions: frozenset[str], powers: bool) -> None:
        self._tokens = tokens
        self._names = names
        self._functions = functions
        self._powers = powers
        self._place = 0
        self._depth = 0

    def check(self) -> None:
        digits = self._sum()
        if self._place < len(self._tokens):
            raise Refused(f"{self._tokens[self._place]!r} where the expression should end")
        self._bounded(digits)

    def _peek(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self, *marks: str) -> str:
        token = self._peek()
        if token and token in marks:
            self._place += 1
            return token
        return ""

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            raise Refused(f"{self._peek() or 'the end'!r} where {mark!r} should be")

    @staticmethod
    def _bounded(digits: int) -> int:
        if digits > MAX_DIGITS:
            raise Refused(f"numbers of up to {digits} digits")
        return digits

    def _sum(self) -> int:
        digits = self._product()
        while self._take("+", "-"):
            digits += self._product() + 1
        return self._bounded(digits)

    def _product(self) -> int:
        digits = self._signed()
        while self._take("*", "/"):
            digits += self._signed() + 1
        return self._bounded(digits)

    def _signed(self) -> int:
        while self._take("+", "-"):
            pass
        return self._power()

    def _power(self) -> int:
        bare = self._peek() in self._names
        digits = self._atom()
        if not self._take("**"):
            return digits
        if not self._powers:
            raise Refused("a power where none is asked for")
        if bare:
            # The power of a variable, or of E, is never worked out, so its exponent may be any expression.
            while self._take("+", "-"):
                pass
            digits += self._atom() + 1
        else:
            digits *= self._exponent()
        if self._peek() == "**":
            raise Refused("a power of a power without brackets")
        return self._bounded(digits)

    def _exponent(self) -> int:
        """A small constant, `2`, `-2`, `0.5` or `(-1/2)`: returns how often the base may be multiplied by itself."""
        bracket = self._take("(")
        while self._take("+", "-"):
            pass
        value = self._small()
        if bracket:
            if self._take("/"):
                self._small()
            self._expect(")")
        return value

    def _small(self) -> int:
        token = self._peek()
        if not token[:1].isdigit() or float(token) > MAX_EXPONENT:
            raise Refused(f"{token or 'nothing'!r} as an exponent")
        self._place += 1
        return int(float(token)) + 1

    def _atom(self) -> int:
        token = self._peek()
        self._place += 1
        if token == "(":
            return self._bracket()
        if token[:1].isdigit():
            return len(token)
        if token in self._functions:
            self._expect("(")
            return self._bracket() + 1
        if token in self._names:
            return 1
        raise Refused(f"{token or 'the end'!r} where a number or a variable should be")

    def _bracket(self) -> int:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Refused(f"more than {MAX_DEPTH} brackets inside each other")
        digits = self._sum()
        self._expect(")")
        self._depth -= 1
        return digits


def _full(pattern: str) -> Rule:
    compiled = re.compile(pattern, re.ASCII)

    def rule(answer: str, metadata: Mapping[str, Any]) -> None:
        del metadata
        if compiled.fullmatch(answer) is None:
            raise Refused("neither the text that the task asks for nor a plain list of it")

    return rule


def _list(item: str) -> str:
    """A Python list of `item`. Possessive quantifiers, so that no text makes the match backtrack."""
    return rf"\[\s*+(?:{item}\s*+(?:,\s*+{item}\s*+)*+(?:,\s*+)?+)?+\]"


_QUEEN = r"""(?:'[_Q]'|"[_Q]")"""
_LETTER = r"""(?:'[A-E]'|"[A-E]")"""
_INTEGER = r"-?\d{1,9}"
_INTEGERS = rf"\s*+(?:{_INTEGER}(?:\s++|$))*+"


def _arithmetic(answer: str, metadata: Mapping[str, Any]) -> None:
    del metadata
    expression(answer, powers=False)


def _integral(answer: str, metadata: Mapping[str, Any]) -> None:
    expression(answer, {str(metadata["variable"]), "C", "E", "pi"}, FUNCTIONS)


def _polynomial(answer: str, metadata: Mapping[str, Any]) -> None:
    expression(answer, {str(name) for name in metadata["variables"]})


_RULES: dict[str, Rule] = {
    "binary_matrix": _full(rf"{_INTEGERS}|\s*+{_list(_list(_INTEGER))}\s*+"),
    "countdown": _arithmetic,
    "intermediate_integration": _integral,
    "n_queens": _full(rf"[_Q\s]*+|\s*+{_list(_list(_QUEEN))}\s*+"),
    "polynomial_multiplication": _polynomial,
    "puzzle24": _arithmetic,
    "simple_integration": _integral,
    "spiral_matrix": _full(rf"{_INTEGERS}|\s*+{_list(_INTEGER)}\s*+"),
    "string_insertion": _full(rf"[A-E\s]*+|\s*+{_list(_LETTER)}\s*+"),
}
EVALUATING = frozenset(_RULES)
"""Data sets whose scorer evaluates the answer."""
