"""`swarmnode init` and `swarmnode config`."""

import json
from pathlib import Path
from typing import Any, Literal

from node.config_sources import KeyPath, Loaded
from node.config_text import init_file, markdown, toml_of
from node.errors import NodeError
from node.masking import masked, shown

_VALUE_WIDTH = 44


def write_init_file(path: Path, force: bool) -> None:
    """Write the commented file. Raises NodeError if it exists and `force` is not given, or cannot be written."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(init_file())
    except FileExistsError as error:
        raise NodeError(f"{path} exists: give another path, or --force to overwrite it") from error
    except OSError as error:
        raise NodeError(f"{path} cannot be written: {error.strerror}") from error
    print(f"{path} written. `swarmnode start --config {path}` uses it; in its own directory a plain `start` does too.")


def print_config(loaded: Loaded, form: Literal["text", "json", "toml"]) -> None:
    """Print what is in force, secrets masked."""
    settings = list(loaded.settings())
    if form == "json":
        rows = {s.key: {"value": masked(s.path, s.value), "source": str(s.source)} for s in settings}
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    elif form == "toml":
        print(toml_of(_nested({s.path: masked(s.path, s.value) for s in settings})), end="")
    else:
        width = max(len(s.key) for s in settings)
        for s in settings:
            value = shown(s.path, s.value)
            value = value if len(value) <= _VALUE_WIDTH else value[: _VALUE_WIDTH - 1] + "…"
            print(f"{s.key:<{width}}  {value:<{_VALUE_WIDTH}}  {s.source}")


def print_reference() -> None:
    """Print `docs/configuration.md`."""
    print(markdown(), end="")


def _nested(leaves: dict[KeyPath, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        table = tree
        for name in path[:-1]:
            table = table.setdefault(name, {})
        table[path[-1]] = value
    return tree
