"""Command-line flags as settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node.config_sources import Loaded, Setting, Source, load, load_run, parse_flag
from node.datadir import DataDir

_FLAGS: dict[str, tuple[str, tuple[str, str], Any]] = {
    "data_dir": ("--data-dir", ("node", "data_dir"), None),
    "model": ("--model", ("model", "name"), None),
    "engine": ("--engine", ("engine", "kind"), None),
    "seed": ("--seed", ("node", "seed"), None),
    "silo": ("--silo", ("sharing", "silo"), None),
    "log_json": ("--log-json", ("log", "format"), "json"),
    "no_tty": ("--no-tty", ("log", "view"), "plain"),
    "per_task": ("--per-task", ("evaluation", "per_task"), None),
}
"""Name here: name on the command line, setting, and its value where the flag itself has none."""


def load_with_flags(file: Path | None, settings: Sequence[str] | None, **flags: Any) -> Loaded:
    """The configuration from all sources; flags that are None were not given. Raises ConfigError."""
    return load(_layer(settings, flags), file=file)


def load_run_with_flags(file: Path | None, settings: Sequence[str] | None, **flags: Any) -> Loaded:
    """The configuration of the run in the data directory, else (or with `--config`) that of a run to be.

    Raises ConfigError.
    """
    layer = _layer(settings, flags)
    directory = data_dir_of(flags.get("data_dir"), file)
    recorded = DataDir(directory).config_path
    if file is not None or not recorded.is_file():
        return load(layer, file=file)
    # The directory may have been moved since.
    here = Setting(("node", "data_dir"), str(directory), Source("flag", "--data-dir"))
    return load_run(recorded, [here, *layer])


def data_dir_of(flag: Path | None, file: Path | None = None) -> Path:
    """The data directory that is meant. Raises ConfigError."""
    if flag is not None:
        return flag.expanduser().absolute()
    return load(file=file).config.node.data_dir


def _layer(settings: Sequence[str] | None, flags: dict[str, Any]) -> list[Setting]:
    layer = [parse_flag(text) for text in settings or ()]
    for name, given in flags.items():
        if given is not None:
            flag, path, constant = _FLAGS[name]
            value = constant if constant is not None else str(given) if isinstance(given, Path) else given
            layer.append(Setting(path, value, Source("flag", flag)))
    return layer
