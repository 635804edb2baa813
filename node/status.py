"""`swarmnode status`: how far a node and its swarm are, read from its data directory without disturbing it."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from node.config import RELAY, Config
from node.config_sources import load_run
from node.datadir import DataDir
from node.evaluations import EvaluationRecord, EvaluationsFile, best_first, told
from node.identity import Identity
from node.record import MetricsFile, Record
from node.snapshot import STALE_SECONDS, Contribution, Snapshot, read_snapshot
from node.text import clean
from rl.checkpoint import STATE, CheckpointReader
from rl.pool import PoolError, SqlitePool

RECENT_ROUNDS = 50
"""Rounds that averages look back."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of task went lately: mean reward over so many groups."""

    kind: str
    groups: int
    reward: float


@dataclass(frozen=True, slots=True)
class Status:
    """What can be said about a node from outside. `pid` is None if it does not run.

    `model` is the one that has been trained, or the configured one if nothing is saved yet.

    `evaluation` is the last one, `best` the round of the best checkpoint there is.

    `kinds` are of the node's own groups; `pool_error` says why they could not be counted, if so. `swarm` is None unless
    the node runs in one.
    """

    data_dir: str
    node_id: str | None
    name: str
    model: str | None
    pid: int | None
    rounds: int
    last: Record | None
    reward_recent: float | None
    checkpoints: tuple[int, ...]
    evaluation: EvaluationRecord | None
    best: int | None
    kinds: tuple[Kind, ...]
    pool_error: str | None
    swarm: Snapshot | None


def gather(path: Path) -> Status:
    """Read a data directory, changing nothing in it.

    Raises DataDirError, RecordError, IdentityError or ConfigError if it is damaged.
    """
    data = DataDir.look(path)
    records = MetricsFile(data.metrics_path).last(RECENT_ROUNDS)
    config = load_run(data.config_path).config if data.config_path.is_file() else None
    last = records[-1] if records else None
    node_id = Identity.load(data.identity_path).node_id if data.identity_path.is_file() else None
    checkpoints = CheckpointReader(data.checkpoints_path)
    evaluations = list(EvaluationsFile(data.evaluations_path).read())
    kinds: tuple[Kind, ...] = ()
    pool_error = None
    try:
        kinds = _kinds(data, max(1, last.round - RECENT_ROUNDS + 1), node_id) if last and node_id else ()
    except PoolError as error:
        pool_error = str(error)
    pid = data.running()
    return Status(
        data_dir=str(data.path),
        node_id=node_id,
        name=config.node.name if config else "",
        model=_trained_model(data, checkpoints.rounds()) or (_configured(config) if config else None),
        pid=pid,
        rounds=last.round if last else 0,
        last=last,
        reward_recent=sum(r.reward_local for r in records) / len(records) if records else None,
        checkpoints=tuple(checkpoints.rounds()),
        evaluation=evaluations[-1] if evaluations else None,
        best=next((number for number in best_first(evaluations) if number in checkpoints.rounds()), None),
        kinds=kinds,
        pool_error=pool_error,
        swarm=read_snapshot(data.swarm_path, pid),
    )


def print_status(path: Path, as_json: bool) -> None:
    """Print the status of a node as a table or as JSON."""
    status = gather(path)
    if as_json:
        print(json.dumps(to_json(status), indent=2, ensure_ascii=False))
    else:
        print("\n".join(_lines(status)))


def to_json(status: Status) -> dict[str, Any]:
    """Plain values, with the keys of `metrics.jsonl`, `evaluations.jsonl` and `swarm.json` in `last`, `evaluation` and
    `swarm`.
    """
    return {
        **asdict(status),
        "last": status.last.model_dump(mode="json") if status.last else None,
        "evaluation": status.evaluation.model_dump(mode="json") if status.evaluation else None,
        "swarm": status.swarm.model_dump(mode="json") if status.swarm else None,
    }


def _configured(config: Config) -> str:
    return RELAY if config.node.relay else config.model.name


def _trained_model(data: DataDir, rounds: Sequence[int]) -> str | None:
    """From the newest checkpoint that tells; only a whole read, which takes long, would prove it undamaged."""
    for number in reversed(rounds):
        try:
            return str(json.loads((data.checkpoints_path / f"{number:08}" / STATE).read_bytes())["model"])
        except (FileNotFoundError, ValueError, LookupError, TypeError, RecursionError):
            continue  # pruned meanwhile or damaged: whoever loads it says so
    return None


def _kinds(data: DataDir, since: int, node_id: str) -> tuple[Kind, ...]:
    """Raises PoolError."""
    rows = SqlitePool.success_in(data.pool_path, since, node_id)
    return tuple(Kind(row.kind, row.groups, row.reward) for row in rows)


def _lines(status: Status) -> list[str]:
    name = f" ({status.name})" if status.name else ""
    rows = [
        ("node", f"{status.node_id or 'has no identity yet'}{name}"),
        ("data", status.data_dir),
        ("model", status.model or "not known: never started"),
        ("state", f"running, process {status.pid}" if status.pid is not None else "not running"),
        ("round", str(status.rounds)),
    ]
    if status.last is not None:
        last, ago = status.last, max(0, int(time.time() - status.last.time))
        rows += [
            ("finished", f"{ago} s ago"),
            ("reward", f"{last.reward_local:.3f}, mean of the last {RECENT_ROUNDS} rounds {status.reward_recent:.3f}"),
            ("time", _shares([last])),
        ]
    saved = ", ".join(str(number) for number in status.checkpoints) or "none yet"
    rows.append(("checkpoints", f"after round {saved}" if status.checkpoints else saved))
    if (found := status.evaluation) is not None:
        best = "" if status.best is None else f"; best after round {status.best}"
        rows.append(("held out", f"after round {found.round}: {told(found)}{best}"))
    if status.pool_error is not None:
        rows.append(("pool", status.pool_error))
    if status.swarm is not None:
        rows += _swarm_rows(status.swarm)
    lines = [f"{label:<12} {clean(text)}" for label, text in rows]
    if status.kinds:
        lines += ["", f"{'task':<28} {'success':>8} {'groups':>7}   (last {RECENT_ROUNDS} rounds)"]
        lines += [f"{kind.kind:<28} {kind.reward:>8.1%} {kind.groups:>7}" for kind in status.kinds]
    return lines


def _swarm_rows(swarm: Snapshot) -> list[tuple[str, str]]:
    old = f", as of {int(swarm.age)} s ago" if swarm.age > STALE_SECONDS else ""
    nodes = f"{swarm.connected} node{'' if swarm.connected == 1 else 's'} connected"
    refused = sum(swarm.rejected.values())
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(swarm.rejected.items()))
    lag = swarm.lag_ms
    return [
        ("swarm", f"{swarm.swarm}: {nodes}, {swarm.mesh} in the mesh{old}"),
        *[("address", address) for address in swarm.addresses],
        ("reachable", f"{swarm.reachable}: {swarm.reachable_why}" if swarm.reachable_why else swarm.reachable),
        ("batches", f"{swarm.sent} sent, {swarm.received} received, {swarm.duplicates} of them more than once"),
        ("groups", f"{swarm.groups} received, {swarm.admitted} admitted"),
        ("contribution", _contribution(swarm.contribution)),
        ("rejected", f"{refused} ({reasons})" if refused else "nothing"),
        ("event loop", f"late by {lag.p50:.1f} ms in the median, {lag.p99:.1f} ms p99, {lag.max:.1f} ms at most"),
    ]


def _contribution(of: Contribution) -> str:
    if not of.admitted:
        return f"{of.sent} groups sent; nobody has told yet of having used one"
    return (
        f"{of.sent} groups sent; peers say: trained on {of.trained} times by {of.trained_by} of them, admitted"
        f" {of.admitted} times by {of.admitted_by}"
    )


def _shares(records: Sequence[Record]) -> str:
    generate = sum(r.seconds_generate for r in records)
    score = sum(r.seconds_score for r in records)
    update = sum(r.seconds_update for r in records)
    return f"{generate:.1f} s generate, {score:.1f} s score, {update:.1f} s update"
