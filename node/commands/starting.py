"""`swarmnode start`."""

from node import logs
from node.config_sources import Loaded
from node.daemon import run


def run_node(loaded: Loaded, rounds: int | None) -> int:
    """Run the node in the foreground. Returns the exit status."""
    config = loaded.config
    logs.configure(config.log)
    if loaded.file is not None:
        logs.get().info("configuration file", path=str(loaded.file))
    if config.sharing.silo and config.network.join:
        logs.get().warning("[sharing] silo (--silo) is on: the node trains alone and joins nobody")
    return run(config, rounds)
