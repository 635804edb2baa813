"""Finds verifiers by name: this project's own and those that other packages registered."""

import difflib
import importlib.util
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from verifiers.base import UnknownTask, Verifier, VerifierError
from verifiers.imports import importing

GROUP = "swarmnode.verifiers"
"""The entry-point group. An entry's name is the verifier's name in configurations and task references."""

COMMAND = "command"
"""Served by `verifiers.command` outside the sandbox, so no entry point may take the name."""


def names() -> list[str]:
    """Names of all verifiers that this installation has."""
    return sorted({entry.name for entry in entry_points(group=GROUP)} | {COMMAND})


def load(name: str, options: Mapping[str, Any]) -> Verifier:
    """A new verifier, constructed with `options` as keyword arguments.

    Raises UnknownTask for a name that nothing registered, VerifierError if the verifier does not take the options.
    """
    try:
        with importing():
            factory = _entry(name).load()
    except (ImportError, AttributeError) as error:
        raise VerifierError(f"the verifier {name!r} is registered but cannot be imported: {error}") from error
    try:
        verifier: Verifier = factory(**options)
    except TypeError as error:
        raise VerifierError(f"[verifiers.options.{name}] does not suit this verifier: {error}") from error
    return verifier


def sources() -> list[str]:
    """The folders, or single files, that the packages of all registered verifiers are in."""
    found: set[str] = set()
    for package in {entry.module.partition(".")[0] for entry in entry_points(group=GROUP)}:
        spec = importlib.util.find_spec(package)
        if spec is not None:
            found.update(spec.submodule_search_locations or ([spec.origin] if spec.origin else ()))
    return sorted(found)


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that does not exist: the nearest one that does, and all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {what} {name!r}; {hint}known: {', '.join(known)}"


def _entry(name: str) -> EntryPoint:
    found = [entry for entry in entry_points(group=GROUP) if entry.name == name and name != COMMAND]
    if not found:
        raise UnknownTask(unknown("verifier", name, names()))
    if len({entry.value for entry in found}) > 1:
        raise VerifierError(f"several packages register a verifier {name!r}: {', '.join(e.value for e in found)}")
    return found[0]
