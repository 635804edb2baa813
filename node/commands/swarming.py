"""`swarmnode id` and `swarmnode peers`."""

import json
import shlex
from pathlib import Path

from node.config_sources import load_run
from node.datadir import DataDir
from node.errors import NodeError
from node.identity import Identity
from node.reach import dialable, scope_of
from node.snapshot import STALE_SECONDS, PeerRow, Snapshot, read_snapshot
from node.text import clean
from p2p.ids import short
from p2p.settings import NetworkSettings


class NotRunningError(NodeError):
    """What was asked for is known only while the node runs in a swarm."""


def print_id(path: Path, as_json: bool) -> None:
    """Print the node's id, and the addresses under which it can be joined if it runs.

    The identity is made if there is none: others may need it, for a private swarm, before the node's first start.
    Raises DataDirError, IdentityError or OSError.
    """
    data = DataDir(path)
    identity = _identity(data)
    snapshot = read_snapshot(data.swarm_path, data.running())
    addresses = dialable(snapshot.addresses) if snapshot else []
    if as_json:
        print(json.dumps({"peer_id": identity.node_id, "addresses": [str(address) for address in addresses]}, indent=2))
        return
    print(identity.node_id)
    if snapshot is None:
        print("\nthe addresses to join it by are known while it runs in a swarm, and printed here then")
        return
    others = [address for address in addresses if scope_of(address) != "loopback"]
    swarm = f" --swarm {shlex.quote(snapshot.swarm)}" if snapshot.swarm != _default_swarm() else ""
    print("\nto join it, type on another machine one of:" if others else "\nto join it, type on this machine:")
    for address in others or addresses:
        print(f"swarmnode start{swarm} --join {address}")
    if not others:
        print("it listens on this machine alone: start it with another --listen to let others in")
    elif all(scope_of(address) == "private" for address in others):
        print("these reach it from its own network; `swarmnode doctor` says what to do for others")


def print_peers(path: Path, as_json: bool) -> None:
    """Print the nodes that the running node knows. Raises NotRunningError, DataDirError or ConfigError."""
    data = DataDir.look(path)
    pid = data.running()
    snapshot = read_snapshot(data.swarm_path, pid)
    if snapshot is None:
        raise NotRunningError(_why_none(data, pid))
    if as_json:
        print(snapshot.model_dump_json(indent=2))
        return
    if snapshot.age > STALE_SECONDS:
        print(f"as of {int(snapshot.age)} s ago: the node stands still, or cannot write\n")
    print("\n".join(peer_table(snapshot)))


def peer_table(snapshot: Snapshot) -> list[str]:
    """One line a node: the connected first, then those banned, then the rest."""
    count = len(snapshot.peers)
    lines = [f"swarm {snapshot.swarm}: {count} node{'' if count == 1 else 's'} known, {snapshot.connected} connected"]
    if not snapshot.peers:
        return lines
    head = ("node", "state", "mesh", "score", "batches", "groups", "ours", "address", "rejected")
    rows: list[tuple[str, ...]] = [head]
    rows += [_cells(row) for row in sorted(snapshot.peers, key=_order)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = {3, 4, 5, 6}
    for row in rows:
        cells = (
            cell.rjust(w) if n in right else cell.ljust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def counted(rejected: dict[str, int]) -> str:
    """`wrong_prompt 2, rate 1`, the most frequent first."""
    return ", ".join(f"{clean(reason)} {count}" for reason, count in sorted(rejected.items(), key=lambda i: -i[1]))


def _cells(row: PeerRow) -> tuple[str, ...]:
    state = (
        f"banned {_duration(row.banned_seconds)}" if row.banned_seconds > 0 else "connected" if row.connected else "-"
    )
    return (
        short(clean(row.peer)),
        state,
        "yes" if row.in_mesh else "-",
        f"{row.score:.1f}",
        str(row.batches),
        str(row.groups),
        str(row.ours_trained),
        clean(row.address or "-"),
        counted(row.rejected) or "-",
    )


def _order(row: PeerRow) -> tuple[bool, bool, int, str]:
    return (not row.connected, row.banned_seconds <= 0, -row.groups, row.peer)


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _identity(data: DataDir) -> Identity:
    if data.identity_path.exists():
        return Identity.load(data.identity_path)
    # Under the lock, so that a node that starts just now does not make another.
    with DataDir.open(data.path) as held:
        return Identity.load_or_create(held.identity_path)


def _why_none(data: DataDir, pid: int | None) -> str:
    if pid is None:
        return f"the node in {data.path} is not running: its peers are known while it runs"
    if data.config_path.is_file() and load_run(data.config_path).config.sharing.silo:
        return f"the node in {data.path} trains alone (--silo): it has no peers"
    return f"the node in {data.path} has not told of its swarm yet: it has only just started, or cannot write"


def _default_swarm() -> str:
    return str(NetworkSettings.model_fields["swarm"].default)
