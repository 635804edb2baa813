"""Command-line flags as settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node.config import data_dir_at
from node.config_sources import Loaded, Setting, Source, file_layer, load, load_run, parse_flag
from node.datadir import DataDir
from node.errors import ConfigError
from node.masking import shown

_MODEL = ("model", "name")

_FLAGS: dict[str, tuple[str, tuple[str, str], Any]] = {
    "data_dir": ("--data-dir", ("node", "data_dir"), None),
    "model": ("--model", _MODEL, None),
    "engine": ("--engine", ("engine", "kind"), None),
    "seed": ("--seed", ("node", "seed"), None),
    "silo": ("--silo", ("sharing", "silo"), None),
    "log_json": ("--log-json", ("log", "format"), "json"),
    "no_tty": ("--no-tty", ("log", "view"), "plain"),
    "join": ("--join", ("network", "join"), None),
    "listen": ("--listen", ("network", "listen"), None),
    "swarm": ("--swarm", ("network", "swarm"), None),
    "relay": ("--relay", ("node", "relay"), None),
    "per_task": ("--per-task", ("evaluation", "per_task"), None),
}
"""Name here: name on the command line, setting, and its value where the flag itself has none."""


def load_with_flags(file: Path | None, settings: Sequence[str] | None, **flags: Any) -> Loaded:
    """The configuration from all sources; flags that are None were not given. Raises ConfigError.

    Where nobody names a model, or `auto` is to go on from a checkpoint, it is the one that the data directory trains
    already, so that its recipe counts and not that of some other model.
    """
    layer = _layer(settings, flags)
    loaded = load(layer, file=file)
    data = DataDir(loaded.config.node.data_dir)
    if loaded.config.model.name != "auto" or not data.config_path.is_file():
        return loaded
    if _MODEL in loaded.sources and not any(data.checkpoints_path.glob("*")):
        return loaded
    recorded = data.config_path
    model = [Setting(s.path, s.value, Source("run", str(recorded))) for s in file_layer(recorded) if s.path == _MODEL]
    return load([*layer, *model], file=file)


def load_run_with_flags(file: Path | None, settings: Sequence[str] | None, **flags: Any) -> Loaded:
    """The configuration of the run in the data directory, else (or with `--config`) that of a run to be.

    Raises ConfigError.
    """
    layer = _layer(settings, flags)
    directory = _data_dir(layer, file)
    recorded = DataDir(directory).config_path
    if file is not None or not recorded.is_file():
        return load(layer, file=file)
    # The directory may have been moved since.
    here = Setting(("node", "data_dir"), str(directory), Source("flag", "--data-dir"))
    return load_run(recorded, [here, *layer])


def data_dir_of(flag: str | None) -> Path:
    """The data directory that is meant. Raises ConfigError."""
    return _data_dir(_layer(None, {"data_dir": flag}), None)


def _data_dir(layer: Sequence[Setting], file: Path | None) -> Path:
    """The data directory that the flags name, else the one of the other sources, which are only then looked at."""
    named = [setting.value for setting in layer if setting.path == ("node", "data_dir")]
    if named:
        try:
            return data_dir_at(named[-1])
        except ValueError as error:
            raise ConfigError(f"node.data_dir = {shown(('node', 'data_dir'), named[-1])} (flag): {error}") from error
    return load(layer, file=file).config.node.data_dir


def _layer(settings: Sequence[str] | None, flags: dict[str, Any]) -> list[Setting]:
    layer = [parse_flag(text) for text in settings or ()]
    for name, given in flags.items():
        if given is not None:
            flag, path, constant = _FLAGS[name]
            value = constant if constant is not None else str(given) if isinstance(given, Path) else given
            layer.append(Setting(path, value, Source("flag", flag)))
    return layer
