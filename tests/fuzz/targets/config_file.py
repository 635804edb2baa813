"""Configuration files."""

from node.config import Config
from node.config_sources import RECIPES, load
from node.config_text import dump_toml
from node.errors import ConfigError
from tests.fuzz.scratch import directory

PATH = directory() / "swarmnode.toml"


def seeds() -> list[bytes]:
    written = dump_toml(Config()).encode()
    return [b"", b'[model]\nname = "tiny"\n', written, *(path.read_bytes() for path in sorted(RECIPES.glob("*.toml")))]


def run(data: bytes) -> None:
    PATH.write_bytes(data)
    try:
        loaded = load(file=PATH, environ={})
    except ConfigError as error:
        assert str(error)
        return
    list(loaded.settings())
    PATH.write_bytes(dump_toml(loaded.config).encode())
    assert load(file=PATH, environ={}).config == loaded.config
