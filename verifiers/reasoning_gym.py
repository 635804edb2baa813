"""Tasks from ReasoningGYM (arXiv 2505.24760), the library that SAPO (arXiv 2509.08721, section 4) trains on.

A task is item 0 of a data set of size 1 whose seed is a hash of the reference's seed and index, so it depends on
nothing else: not on what was made before, not on how large a data set another node declares.
"""

import dataclasses
import datetime
import functools
import hashlib
import json
import math
import random
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from importlib.metadata import version as installed_version
from typing import Any

import numpy
import reasoning_gym  # noqa: F401  # registers the data sets
from pydantic import TypeAdapter, ValidationError
from reasoning_gym.factory import DATASETS

from verifiers import grammar
from verifiers.base import (
    MAX_SEED,
    Example,
    NoSuchTask,
    Task,
    TaskRef,
    UnknownTask,
    VerifierError,
    canonical_json,
    is_held_out,
)
from verifiers.registry import unknown

REFUSED = {
    "composite": "it only mixes other data sets; list those as entries of the task mix instead",
    "codeio": "its tasks come from running programs, some of which read the clock or an unseeded random generator, so "
    "two nodes would not make the same task",
}
"""Data sets that cannot be used, and why."""

_SEEDED_ONCE = frozenset({"acre", "gsm_symbolic", "list_functions"})
"""These draw from their seed when they are built; all others when an item is asked for."""

_KEPT_DATASETS = 64
_KEPT_ENTRIES = 512
_EXAMPLE_TRIES = 8

Entry = dict[str, Any]


class ReasoningGym:
    """The verifier `reasoning_gym`. Task configuration: `dataset` and any option of that data set but `seed`, `size`.

    Text in options is restricted to words and to what occurs in the option's default, because the library evaluates
    some of it and opens files named by some, and configurations come from other nodes.
    """

    name = "reasoning_gym"

    def __init__(self) -> None:
        self.version = installed_version("reasoning_gym")
        # Rebuilding a data set means reading word lists of megabytes, so those in use are kept.
        self._dataset = functools.lru_cache(_KEPT_DATASETS)(_build)
        self._entry = functools.lru_cache(_KEPT_ENTRIES)(self._make_entry)
        self._name = functools.lru_cache(_KEPT_ENTRIES)(self._checked_name)

    def canonical(self, config: Mapping[str, Any]) -> str:
        """The data set's name and the options that differ from its defaults.

        Raises UnknownTask for a data set, VerifierError for an option or value that does not exist or is not allowed.
        """
        options = dict(config)
        name = options.pop("dataset", None)
        if not isinstance(name, str):
            raise VerifierError(f"a reasoning_gym task needs dataset = NAME; known: {', '.join(_names())}")
        if name in REFUSED:
            raise VerifierError(f"the data set {name!r} cannot be used: {REFUSED[name]}")
        if name not in DATASETS:
            raise UnknownTask(unknown("data set", name, _names()))
        kept = {}
        for option, value in options.items():
            chosen, default = _option(name, option, value)
            if chosen != default:
                kept[option] = chosen
        _configure(name, kept)
        return canonical_json({"dataset": name, **kept})

    def make(self, ref: TaskRef) -> Task:
        """The task of `ref`, with a solved example made from a seed that all tasks of the configuration share."""
        if ref.version != self.version:
            raise UnknownTask(f"made with reasoning_gym {ref.version}, this node has {self.version}")
        try:
            name = self._name(ref.config)
        except VerifierError as error:
            raise NoSuchTask(str(error)) from error
        entry = self._entry(ref)
        return Task(
            ref=ref,
            kind=name,
            prompt=entry["question"],
            answer=entry["answer"],
            example=self._example(ref, entry["question"]),
        )

    def score(self, task: Task, answer: str) -> float:
        """The library's own score of `answer`. Raises grammar.Refused for one that its scorer must not see."""
        entry = self._entry(task.ref)
        name = self._name(task.ref.config)
        grammar.check(name, answer, entry["metadata"])
        if name in _ALSO and not _ALSO[name](answer, entry):
            return 0.0
        # Some scorers write into the entry.
        score = float(self._dataset(task.ref.config).score_answer(answer, deepcopy(entry)))
        return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0

    def _checked_name(self, config: str) -> str:
        """The data set that a configuration names. One task has one reference, so other spellings are refused."""
        parsed = _parse(config)
        if self.canonical(parsed) != config:
            raise VerifierError(f"not the canonical spelling of this task configuration: {config}")
        return str(parsed["dataset"])

    def _make_entry(self, ref: TaskRef) -> Entry:
        name = self._name(ref.config)
        seed = _derived_seed(ref)
        # A few generators draw from the global generators instead of their own.
        random.seed(seed)
        numpy.random.seed(seed)
        if name in _SEEDED_ONCE:
            dataset = _build(ref.config, seed)
        else:
            dataset = self._dataset(ref.config)
            dataset.seed = dataset.config.seed = seed
        entry: Entry = dataset[0]
        answer = entry["answer"]
        return {**entry, "question": str(entry["question"]), "answer": None if answer is None else str(answer)}

    def _example(self, ref: TaskRef, prompt: str) -> Example | None:
        """None where the data set has no written answers, or too few questions to show one that is not the task."""
        for index in range(_EXAMPLE_TRIES):
            entry = self._entry(dataclasses.replace(ref, seed=MAX_SEED, index=index))
            question, answer = entry["question"], entry["answer"]
            if answer and question != prompt and not is_held_out(question):
                return Example(question, answer)
        return None


def _names() -> list[str]:
    return sorted(set(DATASETS) - set(REFUSED))


def _parse(config: str) -> dict[str, Any]:
    try:
        parsed = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise VerifierError(f"this task configuration is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise VerifierError("this task configuration is not a JSON object")
    return parsed


def _derived_seed(ref: TaskRef) -> int:
    """32 bits, the most that every generator in the library takes as a seed."""
    text = f"{ref.seed}:{ref.index}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "big")


def _build(config: str, seed: int = 0) -> Any:
    options = _parse(config)
    name = options.pop("dataset")
    return DATASETS[name][0](_configure(name, options, seed=seed, size=1))


def _configure(name: str, options: Mapping[str, Any], **more: Any) -> Any:
    """The data set's configuration object, with options as JSON holds them. Raises VerifierError if it refuses them."""
    hints = _hints(name)
    values = {option: _typed(name, option, hints[option], value) for option, value in options.items()}
    config = DATASETS[name][1](**values, **more)
    if hasattr(config, "validate"):
        try:
            config.validate()
        except (AssertionError, ValueError, TypeError) as error:
            raise VerifierError(f"the data set {name!r} does not allow these options: {error}") from error
    return config


@functools.cache
def _hints(name: str) -> dict[str, Any]:
    hints = typing.get_type_hints(DATASETS[name][1])
    # The library writes tuple[str] where it means any number of them.
    return {option: tuple[str, ...] if hint == tuple[str] else hint for option, hint in hints.items()}


@functools.cache
def _defaults(name: str) -> dict[str, Any]:
    """Default of each option, as JSON holds it."""
    config = DATASETS[name][1]()
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    return TypeAdapter(Any).dump_python(value, mode="json")


def _option(name: str, option: str, value: Any) -> tuple[Any, Any]:
    """A checked value and its default, both as JSON holds them."""
    if option in ("seed", "size"):
        raise VerifierError(f"{option!r} is not for configurations: every task has a seed and an index of its own")
    defaults = {key: default for key, default in _defaults(name).items() if key not in ("seed", "size")}
    if option not in defaults:
        raise VerifierError(unknown(f"option of the data set {name!r}:", option, defaults))
    hint = _hints(name)[option]
    chosen = _plain(_typed(name, option, hint, value))
    if hint not in (datetime.date, datetime.time):
        known = set(_texts(defaults[option]))
        for text in _texts(chosen):
            if text not in known and _WORDS.fullmatch(text) is None:
                raise VerifierError(f"{name}.{option}: the text {text!r} is not allowed; words of letters are")
    return chosen, defaults[option]


_WORDS = re.compile(r"[A-Za-z]{1,32}(?:[ _][A-Za-z]{1,32}){0,3}")


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _typed(name: str, option: str, hint: Any, value: Any) -> Any:
    try:
        return TypeAdapter(hint).validate_json(canonical_json({"v": value})[5:-1], strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise VerifierError(f"{name}.{option}: {first['msg']} (got {first['input']!r})") from error


def _same_numbers(answer: str, entry: Entry) -> bool:
    """Puzzle 24: the library counts any four numbers in range, asked for or not."""
    numbers: list[int] = entry["metadata"]["numbers"]
    return sorted(map(int, re.findall(r"\d+", answer))) == sorted(numbers)


def _same_word(answer: str, entry: Entry) -> bool:
    """The library compares truth values of two texts, so any text is right."""
    return answer.strip().lower() == str(entry["answer"]).lower()


def _a_number(answer: str, entry: Entry) -> bool:
    """The library takes the distance between nan and the right number for none."""
    del entry
    return "nan" not in answer.lower()


_PROBABILITY = re.compile(r"\s*\d{1,30}(?:\.\d{1,30})?(?:/\d{1,30})?\s*")


def _same_probability(answer: str, entry: Entry) -> bool:
    """The library compares as many leading digits as the shorter number has, so 0 is right for 0.25."""
    if _PROBABILITY.fullmatch(answer) is None:
        return False
    given, _, divisor = answer.partition("/")
    return float(divisor or 1) != 0 and abs(float(given) / float(divisor or 1) - float(entry["answer"])) <= 1e-4


_ALSO: dict[str, Callable[[str, Entry], bool]] = {
    "complex_arithmetic": _a_number,
    "coin_flip": _same_probability,
    "game_of_life_halting": _same_word,
    "puzzle24": _same_numbers,
}
"""What a right answer must satisfy besides the library's scorer, where that accepts wrong ones."""
