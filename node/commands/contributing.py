"""`swarmnode contribute`."""

import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from node import logs
from node.config import Config
from node.config_sources import Loaded
from node.contributing.asking import Source
from node.contributing.command import CommandSource
from node.contributing.remote import Remote, open_remote
from node.contributing.run import OpenSource, Wanted, contribute
from node.errors import ConfigError
from p2p.schema import MAX_NAME

_NAME = re.compile(r"[^\w./:+-]+")


def run_contribution(
    loaded: Loaded,
    command: str | None,
    as_json: bool,
    url: str | None,
    model: str | None,
    variable: str,
    seconds: float,
    tasks: int | None,
    at_once: int,
) -> int:
    """Have a person, a program or a model elsewhere answer tasks. Returns the exit status.

    Raises ConfigError for flags that do not go together, NodeError.
    """
    config = loaded.config
    if command is not None and url is not None:
        raise ConfigError("--command and --openai exclude each other: give one of them")
    if (url is None) != (model is None):
        raise ConfigError("--openai URL and --model NAME go together")
    if as_json and command is None:
        raise ConfigError("--json is for --command, whose program then reads JSON")
    source = None
    name = "person"
    if command is not None:
        program = CommandSource(command, seconds, config.admission.max_completion, as_json)
        # What cannot be run is said before anything is opened.
        program.check()
        source, name = _ready(program), program.name
    elif url is not None and model is not None:
        source, name = _remote(config, url, model, variable, seconds), model
    elif sys.stdin.isatty() and config.log.level == "info":
        # Lines of the log would stand between a task and its answer.
        config = config.model_copy(update={"log": config.log.model_copy(update={"level": "warning"})})
    logs.configure(config.log)
    return contribute(config, Wanted(_NAME.sub("_", name)[:MAX_NAME] or "model", source, tasks, at_once))


def _ready(program: CommandSource) -> OpenSource:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Source]:
        yield program

    return opened


def _remote(config: Config, url: str, model: str, variable: str, seconds: float) -> OpenSource:
    remote = Remote(
        url,
        model,
        config.prompt,
        config.sampling.max_new_tokens,
        config.sampling.temperature,
        config.sampling.top_p,
        seconds,
        config.admission.max_completion,
        variable,
    )
    # Said before anything is opened.
    remote.key(os.environ)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Source]:
        async with open_remote(remote) as source:
            yield source

    return opened
