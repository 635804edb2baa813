"""Secrets in the configuration, hidden from whatever is printed."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MASK = "********"

_NAME = (
    r"(?:[\w.-]*[_.-])?(?:token|secret|password|passwd|pwd|passphrase|credentials?|auth|authorization"
    r"|(?:api|private|access|secret)[_-]?key)"
)
_SECRET = re.compile(_NAME, re.I)
_ASSIGNED = re.compile(rf"(?<![\w.-])({_NAME}[\"']?\s*[=:]\s*)\S.*", re.I | re.S)
_USER_INFO = re.compile(r"(\w://)[^\s/?#]+@")


def masked(path: tuple[str, ...], value: Any) -> Any:
    """`value` without its secrets.

    Hidden are: all that stands under the name of a secret (`token`, `api_key`, ...); in a text or a list of arguments
    what follows such a name (`NAME=VALUE`, `Name: value`, `--name value`), to the end of the text; and the user part of
    a URL. A prompt is shown as it is: the model is told it anyway.
    """
    if any(_SECRET.fullmatch(part) for part in path) and value not in (None, ""):
        return MASK
    if isinstance(value, Mapping):
        return {name: masked((*path, str(name)), inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return list(_masked_items(path, value))
    return _masked_text(value) if isinstance(value, str) and path[:1] != ("prompt",) else value


def _masked_items(path: tuple[str, ...], items: Sequence[Any]) -> Iterator[Any]:
    before: Any = None
    for item in items:
        option = isinstance(before, str) and before.startswith("-") and _SECRET.fullmatch(before.lstrip("-"))
        yield MASK if option else masked(path, item)
        before = item


def _masked_text(text: str) -> str:
    return _ASSIGNED.sub(rf"\1{MASK}", _USER_INFO.sub(rf"\1{MASK}@", text))


def shown(path: tuple[str, ...], value: Any) -> str:
    """A value for a message: JSON, secrets masked, cut short."""
    text = json.dumps(masked(path, value), default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
