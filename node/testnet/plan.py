"""What each node of a testnet is started with: a folder, a port, the addresses of the others, and settings."""

import random
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from node.commands.flags import load_with_flags
from node.config import Config, data_dir_at
from node.config_sources import Loaded
from node.datadir import DataDir
from node.errors import NodeError
from node.identity import Identity
from node.record import MetricsFile
from rl import machine
from rl.model_names import TINY

DEFAULT_NODES = 4

T = TypeVar("T")

_ALONE = (
    "network.swarm=testnet",
    # All addresses are known, so nothing is searched for, and nothing leaves this machine.
    "network.mdns=false",
    "network.dht=false",
    "network.upnp=false",
    # Rounds of a tiny model are so short that a node which starts, and has a core to itself only now and then, lags.
    "admission.queue=256",
)

_PORTS = range(20_000, 32_000)
"""Below what Linux takes for outgoing connections, so that no node's dialling takes the port of one that restarts."""

_WAIT_SECONDS = 120.0
"""How long the first round waits for the whole swarm: loading N models on one machine takes its time."""

_CACHE_SHARE = 0.5
"""Of the free memory, what the engines of all nodes may take for their caches; policies and system have the rest."""

_LEAST_CACHE_GIB, _MOST_CACHE_GIB = 0.5, 2.0
"""The least holds one whole context of a small model, the most 128 of its rollouts at once."""


class PlanError(NodeError):
    """What was asked for makes no testnet. The message says what to change."""

    exit_status = 2


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was typed. `models` and `configs` hold none, one for all nodes, or one a node."""

    nodes: int | None = None
    directory: str = "testnet"
    rounds: int | None = None
    models: Sequence[str] = ()
    configs: Sequence[Path] = ()
    settings: Sequence[str] = ()
    seed: int | None = None
    engine: str | None = None

    @property
    def path(self) -> Path:
        """The directory of the testnet, absolute. Raises PlanError if there can be none of this name."""
        try:
            return data_dir_at(self.directory)
        except ValueError as error:
            raise PlanError(f"--dir {self.directory}: {error}") from error

    @property
    def count(self) -> int:
        """How many nodes. Raises PlanError if the lists do not fit together."""
        lists = {"--model": len(self.models), "--config": len(self.configs)}
        count = self.nodes or max((length for length in lists.values() if length > 1), default=DEFAULT_NODES)
        for flag, length in lists.items():
            if length not in (0, 1, count):
                raise PlanError(
                    f"{flag} is given {length} times for {count} nodes: give it once for all of them, or once a node"
                )
        return count


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node. `done` is the last round it has recorded, `resumes` whether its folder holds a run to go on with."""

    name: str
    data_dir: Path
    log: Path
    model: str
    address: str
    silo: bool
    done: int
    resumes: bool
    arguments: tuple[str, ...]

    def command(self, again: bool = False) -> list[str]:
        """The command line. One that is started `again` does not wait for others, which may be done already."""
        waits = ("--set", "network.wait_for_peers=0") if again else ()
        return [sys.executable, "-m", "node.cli", "start", *self.arguments, *waits]


def make_plans(wishes: Wishes) -> list[NodePlan]:
    """The nodes, each with a folder that holds its identity.

    Raises PlanError or ConfigError before anything is written, DataDirError or OSError.
    """
    directory = wishes.path
    numbers = range(1, wishes.count + 1)
    # All of them before the first folder is made: a mistake leaves nothing behind.
    loaded = [_load(wishes, directory, number) for number in numbers]
    ports = free_ports(wishes.count)
    plans = [_plan(wishes, directory, *parts) for parts in zip(numbers, loaded, ports, strict=True)]
    meeting = [plan for plan in plans if not plan.silo and (wishes.rounds is None or plan.done < wishes.rounds)]
    return [_connected(plan, meeting, wishes.settings) for plan in plans]


def _load(wishes: Wishes, directory: Path, number: int) -> Loaded:
    """The node's configuration as it will load it. Raises ConfigError."""

    def load(model: str | None) -> Loaded:
        return load_with_flags(
            _of(wishes.configs, number),
            [*_ALONE, *wishes.settings],
            data_dir=str(_data_dir(directory, number)),
            model=model,
            engine=wishes.engine,
            seed=_seed(wishes, number),
            no_tty=True,
        )

    loaded = load(_of(wishes.models, number))
    return loaded if ("model", "name") in loaded.sources else load(TINY)


def _plan(wishes: Wishes, directory: Path, number: int, loaded: Loaded, port: int) -> NodePlan:
    """The plan, without what it takes to know the other nodes."""
    name = f"node-{number}"
    data = DataDir(_data_dir(directory, number))
    config, seed = _of(wishes.configs, number), _seed(wishes, number)
    # The model is named even where it follows from the recorded run or is this command's own default.
    arguments = ["--data-dir", str(data.path), "--no-tty", "--model", loaded.config.model.name]
    arguments += ["--config", str(config)] if config is not None else []
    arguments += ["--engine", wishes.engine] if wishes.engine is not None else []
    arguments += ["--seed", str(seed)] if seed is not None else []
    arguments += ["--rounds", str(wishes.rounds)] if wishes.rounds is not None else []
    settings = list(_ALONE)
    if ("node", "name") not in loaded.sources:
        settings.append(f"node.name={name}")
    if ("node", "threads") not in loaded.sources:
        settings.append(f"node.threads={max(1, machine.cpus() // wishes.count)}")
    if ("engine", "memory_gb") not in loaded.sources and _may_take_vllm(loaded.config):
        settings.append(f"engine.memory_gb={_cache_gib(wishes.count)}")
    if ("api", "port") not in loaded.sources:
        # They share this machine's ports.
        settings.append("api.port=0")
    listen = f"/ip4/127.0.0.1/tcp/{port}"
    settings.append(f"network.listen={_json_list([listen])}")
    recorded = MetricsFile(data.metrics_path).last(1)
    return NodePlan(
        name=name,
        data_dir=data.path,
        log=directory / f"{name}.log",
        model=loaded.config.model.name,
        address=f"{listen}/p2p/{_peer_id(data.path)}",
        silo=loaded.config.sharing.silo,
        done=recorded[0].round if recorded else 0,
        resumes=data.holds_run,
        arguments=(*arguments, *_flags(settings)),
    )


def _may_take_vllm(config: Config) -> bool:
    kind = config.engine.kind
    return kind == "vllm" or (kind == "auto" and config.model.name != TINY)


def _cache_gib(nodes: int) -> float:
    """A node's share of the memory that is free now, for its engine's cache.

    Each engine looks for itself at what is free, and those that start side by side would count the same memory.
    """
    free = machine.memory().available / 2**30
    return round(min(_MOST_CACHE_GIB, max(_LEAST_CACHE_GIB, free * _CACHE_SHARE / nodes)), 2)


def _connected(plan: NodePlan, meeting: Sequence[NodePlan], settings: Sequence[str]) -> NodePlan:
    """The plan with the addresses of the nodes that it will meet; the operator's own settings come last and win."""
    others = [other.address for other in meeting if other.name != plan.name]
    network = [
        f"network.join={_json_list(others)}",
        f"network.wait_for_peers={len(others)}",
        f"network.wait_seconds={_WAIT_SECONDS}",
    ]
    return replace(plan, arguments=(*plan.arguments, *_flags([*network, *settings])))


def _flags(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def _json_list(texts: Sequence[str]) -> str:
    return "[" + ",".join(f'"{text}"' for text in texts) + "]"


def _data_dir(directory: Path, number: int) -> Path:
    return directory / f"node-{number}"


def _of(given: Sequence[T], number: int) -> T | None:
    """Node `number`'s own of a list with none, one for all, or one a node."""
    return given[0 if len(given) == 1 else number - 1] if given else None


def _seed(wishes: Wishes, number: int) -> int | None:
    """Each node has its own, since two with one seed would draw the same tasks."""
    return None if wishes.seed is None else wishes.seed + number - 1


def _peer_id(path: Path) -> str:
    """The id of the node in a data directory, made if it has none. Raises DataDirError if a node runs there."""
    with DataDir.open(path) as data:
        return Identity.load_or_create(data.identity_path).node_id


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody listens on just now."""
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise PlanError(f"this machine has no {count} free ports from {_PORTS.start} to {_PORTS.stop}")
