"""`swarmnode status --check`: whether a node is at work, in one line and an exit status, for whoever supervises it."""

from pathlib import Path

from node.api.client import NodeClient
from node.config_sources import load_run
from node.datadir import DataDir
from node.errors import NodeError
from node.snapshot import STALE_SECONDS, read_snapshot
from node.text import clean


class NotAtWork(NodeError):
    """The node does not run, has not loaded its model yet, or gives no sign of life."""


def check(path: Path) -> str:
    """How the node in a data directory does, in a line.

    A node that serves HTTP is asked; one that does not shows its life by `swarm.json`, and alone by its process only.
    Whether rounds get on is not looked at: the node itself replaces a learner that hangs. Raises NotAtWork, NoAnswer,
    DataDirError, ConfigError.
    """
    data = DataDir.look(path)
    pid = data.running()
    if pid is None:
        raise NotAtWork(f"no node runs in {data.path}")
    config = load_run(data.config_path).config if data.config_path.is_file() else None
    if config is None:
        raise NotAtWork("the node has only just started")
    if config.api.dashboard or config.api.openai:
        return _asked(data)
    if config.sharing.silo:
        return f"running, process {pid}"
    snapshot = read_snapshot(data.swarm_path, pid)
    if snapshot is None or snapshot.age > STALE_SECONDS:
        raise NotAtWork(f"the node (process {pid}) has said nothing for {STALE_SECONDS:g} s")
    return f"running, process {pid}, {snapshot.connected} connected"


def _asked(data: DataDir) -> str:
    """Raises NotAtWork, NoAnswer."""
    status = NodeClient(data).get("status")
    state, phase, number = clean(status["state"]), clean(status["phase"]), status["round"]
    if state == "starting":
        raise NotAtWork(f"the node is still starting: {phase}")
    return f"{state}, {phase}, {number} rounds done, {status['peers']} connected"
