"""`swarmnode start`."""

from node import logs
from node.config_sources import Loaded
from node.daemon import run

ALONE = "this version has no network yet: the node trains alone, with --silo and without it"


def run_node(loaded: Loaded, rounds: int | None) -> int:
    """Run the node in the foreground. Returns the exit status."""
    config = loaded.config
    logs.configure(config.log)
    if loaded.file is not None:
        logs.get().info("configuration file", path=str(loaded.file))
    if not config.sharing.silo:
        logs.get().warning(ALONE)
    return run(config, rounds)
