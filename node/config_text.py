"""The configuration as text: TOML, the commented file of `swarmnode init`, and the reference in `docs/`."""

import json
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import annotated_types
import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from node.config import Config
from verifiers.settings import CommandSettings, MixEntry

_WIDTH = 100

_LIST_ITEMS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("[[tasks.mix]]", MixEntry),
    ("[verifiers.commands.NAME]", CommandSettings),
)
"""Tables that may stand many times, and therefore have no default of their own."""


def dump_toml(config: Config) -> str:
    """The whole configuration as TOML. Values that are not set are left out."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def toml_of(tree: Mapping[str, Any]) -> str:
    """A nested table as TOML, without what is None."""
    return tomli_w.dumps(_without_none(tree))


def init_file() -> str:
    """A TOML file with every setting, its meaning and its default, all commented out: `# prose`, `#setting`."""
    lines = [
        "# Configuration of a swarmnode. Settings stand here with their default; take the # away to set one.",
        "# Environment variables (SWARMNODE_TRAINING__LR=1e-5) and flags (--set training.lr=1e-5) override this file;",
        "# a model's recipe stands below it. `swarmnode config` shows what is in force and where it came from.",
    ]
    for name, model in _sections():
        lines += ["", "", *_comment(_section_text(model)), f"[{name}]"]
        for key, field in model.model_fields.items():
            lines += ["", *_comment(" ".join((field.description or "").split())), *_default_lines(key, field)]
    return "\n".join(lines) + "\n"


def markdown() -> str:
    """The reference of all settings (`docs/configuration.md`)."""
    lines = [_INTRODUCTION.strip()]
    for name, model in [(f"[{n}]", m) for n, m in _sections()] + list(_LIST_ITEMS):
        lines += [
            "",
            f"## `{name}`",
            "",
            _section_text(model),
            "",
            "| key | default | allowed | meaning |",
            "|---|---|---|---|",
        ]
        for key, field in model.model_fields.items():
            meaning = " ".join((field.description or "").split())
            cells = [f"`{key}`", _default_cell(field), allowed(field), meaning]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


_INTRODUCTION = """
# Configuration

<!-- Made by `swarmnode config --reference`; a test keeps it current. -->

Every setting has a default, so none has to be given. Where several sources set one, the later of this list wins:

1. the built-in default, as listed below;
2. the recipe of the model (`node/recipes/`): what suits it, for example a task mix within its reach;
3. a TOML file: the one named by `--config FILE`, else by the variable `SWARMNODE_CONFIG`, else `swarmnode.toml` in the
   working directory if there is one. `swarmnode init` writes one with everything in it, commented out;
4. environment variables: `SWARMNODE_TRAINING__LR=1e-5` sets `lr` in `[training]` (two underscores between the parts);
   lists and tables are written as JSON;
5. flags: `--model`, `--seed` and so on, and `--set training.lr=1e-5` for every setting.

Tables merge key by key; a list replaces the list below it as a whole. Unknown keys are refused, with the nearest valid
name. `swarmnode config` prints what is in force and where each value came from.

At every start the node writes the configuration in force to `config.toml` in its data directory. `eval`, `chat` and
`export` read it from there, so that they need no other flag than `--data-dir`; the file above and the environment do
not count for them, `--set` does.

Kubernetes sets variables such as `SWARMNODE_SERVICE_HOST` for a service called `swarmnode`; those are passed over.
"""


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in Config.model_fields.items():
        yield name, typing.cast(type[BaseModel], field.annotation)


def _section_text(model: type[BaseModel]) -> str:
    """The docstring of a section, without the name of it that it begins with."""
    text = " ".join((model.__doc__ or "").split())
    return text.partition(": ")[2][:1].upper() + text.partition(": ")[2][1:]


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH)]


def _default_lines(key: str, field: FieldInfo) -> list[str]:
    value = _default(field)
    if value is None:
        return [f"# {key} = ...  (not set; {allowed(field)})"]
    if _shown(field) is not None:
        return [f"# {key} = ...  ({value})"]
    if value == {} or (isinstance(value, list) and all(isinstance(inner, float) for inner in value)):
        return [f"#{key} = {value}"]
    return [f"#{line}" for line in tomli_w.dumps({key: value}).rstrip().splitlines()]


def _default(field: FieldInfo) -> Any:
    if _shown(field) is not None:
        return _shown(field)
    return _plain(field.get_default(call_default_factory=True)) if not field.is_required() else None


def _shown(field: FieldInfo) -> str | None:
    """How to write a default that is not the same for everyone."""
    extra = field.json_schema_extra
    return str(extra["shown"]) if isinstance(extra, dict) and "shown" in extra else None


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


def _default_cell(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    value = _default(field)
    if value is None:
        return "(not set)"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "the nine data sets of the paper"
    if value == {} or _shown(field) is not None:
        return value or "(none)"
    return f"`{json.dumps(value)}`"


def allowed(field: FieldInfo) -> str:
    """What a setting takes, in words."""
    return _type_words(field.annotation) + _bounds(field.metadata)


def _type_words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_words(a) for a in arguments if a is not types.NoneType)
    if origin is typing.Annotated:
        return _type_words(arguments[0])
    if origin is tuple:
        return f"list of {len(arguments)} numbers"
    if origin is list:
        return "list of tables" if arguments[0] is MixEntry else "list of texts"
    if origin is dict:
        return "table"
    names = {bool: "true, false", int: "whole number", float: "number", str: "text"}
    return names.get(annotation, "path")


def _bounds(metadata: Iterable[Any]) -> str:
    words = []
    for constraint in metadata:
        for kind, attribute, sign in (
            (annotated_types.Ge, "ge", "≥"),
            (annotated_types.Gt, "gt", ">"),
            (annotated_types.Le, "le", "≤"),
            (annotated_types.Lt, "lt", "<"),
        ):
            if isinstance(constraint, kind):
                words.append(f"{sign} {getattr(constraint, attribute)}")
    return " " + ", ".join(words) if words else ""


def _without_none(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    if isinstance(tree, list):
        return [_without_none(value) for value in tree]
    return tree
