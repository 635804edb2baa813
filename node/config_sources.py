"""Where the configuration comes from, and which source wins.

Lowest first: built-in default, the recipe of the model, the TOML file, the environment, command-line flags. Each layer
is flattened to paths (`training.lr`), so that every value that ends up in force still knows who set it, and a mistake
is reported with the place where it stands. Tables merge by key; lists are replaced as a whole.
"""

import difflib
import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from node.config import Config
from node.errors import ConfigError
from node.masking import shown
from rl.model_names import recipe_of

KeyPath = tuple[str, ...]

PREFIX = "SWARMNODE_"
CONFIG_VARIABLE = "SWARMNODE_CONFIG"
DEFAULT_FILE = Path("swarmnode.toml")
RECIPES = Path(__file__).parent / "recipes"

# What Kubernetes puts into every container of a namespace that has a service called "swarmnode".
_SERVICE_LINK = re.compile(r"SWARMNODE_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_\w+)?)?)")

_MAX_DEPTH = 32
"""Tables and lists inside one another. No setting needs as many."""


@dataclass(frozen=True, slots=True)
class Source:
    """Who set a value. `where` is a recipe's name, a file and line, a variable or a flag."""

    kind: Literal["default", "recipe", "file", "environment", "flag", "run"]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".strip()


DEFAULT = Source("default")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value in force."""

    path: KeyPath
    value: Any
    source: Source

    @property
    def key(self) -> str:
        """As it is written in `--set`: `training.lr`."""
        return ".".join(self.path)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked configuration and where each of its values came from."""

    config: Config
    sources: Mapping[KeyPath, Source]
    file: Path | None

    def settings(self) -> Iterator[Setting]:
        """Every value in force, in the order of the tree."""
        for path, value in flatten(self.config.model_dump(mode="json")):
            yield Setting(path, value, self._source(path))

    def _source(self, path: KeyPath) -> Source:
        return next((self.sources[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.sources), DEFAULT)


Layer = list[Setting]


def load(
    flags: Sequence[Setting] = (),
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """The configuration from all sources. Raises ConfigError.

    `file` is what `--config` named; without it `$SWARMNODE_CONFIG`, else `swarmnode.toml` in the working directory if
    there is one. `environ` is the process's own unless given.
    """
    variables = os.environ if environ is None else environ
    path = _file(file, variables)
    layers: list[Layer] = [
        file_layer(path) if path is not None else [],
        _environment_layer(variables),
        list(flags),
    ]
    return _checked([_recipe_layer(layers), *layers], path)


def load_run(file: Path, flags: Sequence[Setting] = ()) -> Loaded:
    """The configuration of a run from the file that `node.daemon` wrote into its data directory. Raises ConfigError.

    The recipe and the environment of that time are already in it, so only flags count beside it.
    """
    run = [Setting(s.path, s.value, Source("run", str(file))) for s in file_layer(file)]
    return _checked([run, list(flags)], file)


def parse_flag(text: str) -> Setting:
    """The setting in `--set training.lr=1e-5`. Raises ConfigError."""
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"--set {text}: write it as section.key=value, for example --set training.lr=1e-5")
    source = Source("flag", f"--set {'.'.join(path)}")
    return Setting(path, _parse(path, value, source), source)


def _file(named: Path | None, variables: Mapping[str, str]) -> Path | None:
    if named is None and variables.get(CONFIG_VARIABLE):
        named = Path(variables[CONFIG_VARIABLE])
    if named is not None:
        return named
    return DEFAULT_FILE if DEFAULT_FILE.is_file() else None


def file_layer(path: Path, kind: Literal["file", "recipe"] = "file", name: str | None = None) -> Layer:
    """The settings of a TOML file. Raises ConfigError if it cannot be read."""
    try:
        # Some editors put a byte order mark in front.
        text = path.read_text(encoding="utf-8-sig")
        content = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: is nested too deeply") from error
    except ValueError as error:
        raise ConfigError(f"{path}: holds a whole number with too many digits") from error
    if _depth(content) > _MAX_DEPTH:
        raise ConfigError(f"{path}: is nested too deeply: {_MAX_DEPTH} levels are allowed")
    lines = _line_numbers(text)
    return [
        Setting(key, value, Source(kind, name or (f"{path}:{lines[key]}" if key in lines else str(path))))
        for key, value in flatten(content)
    ]


def _line_numbers(text: str) -> dict[KeyPath, int]:
    """Where keys stand, found by a light scan: good enough to point a person to the line."""
    lines: dict[KeyPath, int] = {}
    header: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        if table := re.match(r"\s*\[\[?([^\[\]]+)\]", line):
            header = _key(table[1])
            lines.setdefault(header, number)
        elif assignment := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            lines.setdefault(header + _key(assignment[1]), number)
    return lines


def _key(text: str) -> KeyPath:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


def _recipe_layer(layers: Sequence[Layer]) -> Layer:
    name, device = _last(layers, ("model", "name")), _last(layers, ("model", "device"))
    recipe = recipe_of(name, device) if isinstance(name, str) and isinstance(device, str) else None
    return file_layer(RECIPES / f"{recipe}.toml", "recipe", recipe) if recipe is not None else []


def _last(layers: Sequence[Layer], path: KeyPath) -> Any:
    """What the layers make of a setting, unchecked, its default if none of them has it."""
    section, name = path
    default = getattr(Config.model_fields[section].default, name)
    return next((s.value for layer in reversed(layers) for s in reversed(layer) if s.path == path), default)


def _environment_layer(variables: Mapping[str, str]) -> Layer:
    layer = []
    for variable, text in sorted(variables.items()):
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE or _SERVICE_LINK.fullmatch(variable):
            continue
        source = Source("environment", variable)
        path = tuple(variable.removeprefix(PREFIX).lower().split("__"))
        if annotation_at(path) is None:
            raise ConfigError(f"{variable}: there is no such setting; {_nearest_variable(variable)}")
        layer.append(Setting(path, _parse(path, text, source), source))
    return layer


def _nearest_variable(variable: str) -> str:
    names = {"__".join(path).upper(): path for path in _known_paths(Config)}
    bare = variable.removeprefix(PREFIX)
    close = [name for name, path in names.items() if path[-1] == bare.lower().rpartition("__")[2]]
    close = close or difflib.get_close_matches(bare, names, n=1)
    return f"did you mean {PREFIX}{close[0]}?" if close else "names look like SWARMNODE_TRAINING__LR"


def _parse(path: KeyPath, text: str, source: Source) -> Any:
    """A value written as text: JSON where the setting holds a list or a table, one of its choices, else the text."""
    annotation = annotation_at(path)
    if annotation is None:
        return text
    if typing.get_origin(annotation) is Literal:
        # A choice may be a number, which nobody turns a text into later.
        return next((choice for choice in typing.get_args(annotation) if str(choice) == text.strip()), text)
    kinds = set(_members(annotation))
    if types.NoneType in kinds and text.strip().lower() in ("", "none", "null"):
        return None
    if not any(_holds_json(kind) for kind in kinds) or (str in kinds and text.lstrip()[:1] not in ("[", "{")):
        return text
    head = f"{'.'.join(path)} = {shown(path, text)}"
    if _is_section(annotation) and text.lstrip()[:1] != "{":
        one = ".".join((*path, next(iter(annotation.model_fields))))
        raise ConfigError(f"{head} ({source}): {'.'.join(path)} is a section; name a setting in it, such as {one}")
    try:
        value = json.loads(text)
    except ValueError as error:
        example = '["text", "text"]' if str in typing.get_args(annotation) else "[1, 2]"
        raise ConfigError(f"{head}: must be JSON, such as {example} ({source}): {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{head}: is nested too deeply ({source})") from error
    if _depth(value) > _MAX_DEPTH:
        raise ConfigError(f"{head}: is nested too deeply ({source}): {_MAX_DEPTH} levels are allowed")
    return value


def _depth(value: Any) -> int:
    """How deep tables and lists stand inside one another. Not recursive, as it guards what is."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, (dict, list))]:
        depth += 1
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return depth


def _holds_json(kind: Any) -> bool:
    kind = typing.get_origin(kind) or kind
    return kind is Any or (isinstance(kind, type) and issubclass(kind, (list, tuple, dict, BaseModel)))


def flatten(tree: Mapping[str, Any], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """The leaves of nested tables. A list is a leaf, and so is an empty table."""
    for name, value in tree.items():
        path = (*prefix, name)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, path)
        else:
            yield path, value


def _checked(layers: Iterable[Layer], file: Path | None) -> Loaded:
    merged: dict[KeyPath, Setting] = {}
    for setting in (setting for layer in layers for setting in layer):
        path = setting.path
        if setting.value == {} and _is_section(annotation_at(path)):
            continue  # an empty [section] says nothing about what others put there
        for other in [o for o in merged if o[: len(path)] == path or path[: len(o)] == o]:
            del merged[other]
        merged[path] = setting
    tree: dict[str, Any] = {}
    for path, setting in merged.items():
        table = tree
        for name in path[:-1]:
            table = table.setdefault(name, {})
        table[path[-1]] = setting.value
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_complaints(error, merged))) from error
    loaded = Loaded(config, {path: setting.source for path, setting in merged.items()}, file)
    _check_home(loaded)
    return loaded


def _check_home(loaded: Loaded) -> None:
    path = ("model", "name")
    name = loaded.config.model.name
    try:
        Path(name).expanduser()
    except RuntimeError as error:
        source = loaded.sources.get(path, DEFAULT)
        raise ConfigError(f"model.name = {shown(path, name)} ({source}): there is no such home directory") from error


def _complaints(error: ValidationError, merged: Mapping[KeyPath, Setting]) -> list[str]:
    """One line for each wrong setting; the branches of a union are alternatives of one line."""
    problems: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False):
        location = _located(detail["loc"])
        path = tuple(str(part) for part in location)
        setting = _setter(path, merged)
        key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location).lstrip(".")
        if detail["type"] == "extra_forbidden":
            head, problem = f"{key}: there is no such setting{_nearest(location)}", ""
        elif detail["type"] == "missing":
            head, problem = key, "is required"
        else:
            value = setting.value if setting is not None and setting.path == path else detail["input"]
            head = f"{key} = {shown(path, value)}"
            problem = detail["msg"].replace("Input should be", "must be").replace("Value error, ", "")
        where = f" ({setting.source})" if setting is not None else ""
        texts = problems.setdefault(head + where, [])
        if problem not in texts:
            texts.append(problem)
    return [f"{head}: {' or '.join(texts)}" if any(texts) else head for head, texts in problems.items()]


def _located(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """`loc` without the names that pydantic adds for the branches of a union."""
    annotation: Any = Config
    for position, part in enumerate(loc):
        if _is_section(annotation) and part not in annotation.model_fields:
            return loc[: position + 1]
        below = _step(annotation, part)
        if below is None:
            return loc[:position]
        annotation = below
    return loc


def _setter(path: KeyPath, merged: Mapping[KeyPath, Setting]) -> Setting | None:
    for length in range(len(path), 0, -1):
        if path[:length] in merged:
            return merged[path[:length]]
    # A table that lacks a key was begun by whoever set another key of it.
    table = path[:-1] or path
    return next((s for start in (path, table) for p, s in merged.items() if p[: len(start)] == start), None)


def _nearest(location: tuple[int | str, ...]) -> str:
    annotation: Any = Config
    for part in location[:-1]:
        annotation = _step(annotation, part)
    name = str(location[-1])
    prefix = ".".join(str(part) for part in location[:-1] if not isinstance(part, int))
    elsewhere = [".".join(path) for path in _known_paths(Config) if path[-1] == name]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    close = difflib.get_close_matches(name, annotation.model_fields, n=1)
    if close:
        return f"; did you mean {prefix}.{close[0]}?".replace(" .", " ")
    return f"; {prefix or 'the top level'} has {', '.join(annotation.model_fields)}"


def _known_paths(model: type[BaseModel], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    for name, field in model.model_fields.items():
        if _is_section(field.annotation):
            yield from _known_paths(typing.cast(type[BaseModel], field.annotation), (*prefix, name))
        else:
            yield (*prefix, name)


def annotation_at(path: KeyPath) -> Any | None:
    """The type of the setting at `path`; None if there is no such setting."""
    annotation: Any = Config
    for part in path:
        annotation = _step(annotation, part)
        if annotation is None:
            return None
    return annotation


def _step(annotation: Any, part: int | str) -> Any | None:
    """The type of an entry inside a value of type `annotation`; None if there can be none."""
    if _is_section(annotation):
        field = annotation.model_fields.get(part)
        return None if field is None else field.annotation
    if annotation is Any:
        return Any
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is dict and isinstance(part, str):
        return arguments[1]
    if origin in (list, tuple) and isinstance(part, int):
        return arguments[0]
    return None


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
