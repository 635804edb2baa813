"""`swarmnode rollouts export` and `import`."""

import sys
from pathlib import Path

import trio

from node import logs
from node.config_sources import Loaded
from node.datadir import DataDir
from node.errors import NodeError
from node.identity import Identity
from node.importing import Outcome, import_rollouts, origin_of
from node.rollouts_file import Format, write_rows
from rl.pool import PoolError, SqlitePool

OWN = "own"


def write_pool(path: Path, file: Path, form: Format, since: int, origin: str | None, force: bool) -> None:
    """Write the groups of the pool in the data directory `path` to `file`, and say how many.

    Raises DataDirError if there is none, NodeError if the file exists and `force` is not given or the pool is damaged.
    """
    data = DataDir.look(path)
    if not data.pool_path.is_file():
        raise data.never_used()
    if file.exists() and not force:
        raise NodeError(f"{file} exists: give another file, or --force to overwrite it")
    if not file.absolute().parent.is_dir():
        raise NodeError(f"there is no directory {file.absolute().parent}: make it, or give another file")
    of = Identity.load(data.identity_path).node_id if origin == OWN else origin
    try:
        count = write_rows(SqlitePool.read(data.pool_path, since, of), file, form)
    except PoolError as error:
        raise NodeError(str(error)) from error
    print(f"{file} written: {count} groups")
    if count == 0:
        print("warning: no group in the pool is of that origin and those rounds", file=sys.stderr)


def import_file(loaded: Loaded, file: Path, name: str | None) -> None:
    """Import `file` and say what became of its groups. Raises NodeError, VerifierError or OSError."""
    config = loaded.config
    logs.configure(config.log)
    data = DataDir(config.node.data_dir)
    if not data.holds_run:
        raise data.never_used()
    if not file.is_file():
        raise NodeError(f"there is no file {file}")
    if _is_parquet(file):
        raise NodeError(f"{file} is Parquet, and only JSON lines are read: `rollouts export` writes them by default")
    try:
        outcome = trio.run(import_rollouts, config, file, origin_of(file, name))
    except PoolError as error:
        raise NodeError(str(error)) from error
    print("\n".join(_lines(outcome)))
    if config.sharing.places[1] == 0 and outcome.imported:
        print(
            "warning: this node takes nothing of others (--silo, or [sharing] external = 0), and so does not train on"
            " these groups",
            file=sys.stderr,
        )


def _is_parquet(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(4) == b"PAR1"


def _lines(outcome: Outcome) -> list[str]:
    lines = [f"{outcome.imported} groups imported as {outcome.origin}, {outcome.informative} of them with a gradient"]
    if outcome.known:
        lines.append(f"{outcome.known} were in the pool already")
    if outcome.no_room:
        lines.append(f"{outcome.no_room} left out: [pool] per_peer and max_groups bound what one origin may have there")
    lines += [f"{count} refused: {reason}" for reason, count in sorted(outcome.refused.items())]
    if outcome.refused:
        lines.append("docs/operations.md says what the reasons mean")
    return lines
