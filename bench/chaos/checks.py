"""What must be true of a node when all is over: nothing lost, nothing damaged, nothing that grows."""

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from bench.chaos.members import Member, Sample
from node.datadir import DataDir
from node.record import MetricsFile
from node.rounds_file import RecordError

CHECKPOINT_EVERY = 10
"""Rounds, by default: what a crash may cost."""

PROGRESS = 10
"""Rounds that each node has to finish after the last fault is healed."""

_HARMLESS = {"overloaded", "capped", "stale"}
"""What a node that catches up, or whose clock is wrong, may refuse."""

WARM_ROUNDS = 5
"""Rounds after which a process counts as loaded. Seconds would not do: a busy machine takes minutes to load one."""

MOST_MB, MOST_FILES = 40.0, 16.0
"""By how much a process may grow while it is watched, as the slope says. A pool that fills, and what torch keeps
between batches of two sizes, make half of that."""


def problems_of_record(path: Path) -> list[str]:
    """What is wrong with a metrics.jsonl in which every round from 1 on ought to stand once."""
    try:
        rounds = [record.round for record in MetricsFile(path).read()]
        lines = path.read_bytes()
    except (RecordError, OSError) as error:
        return [f"metrics.jsonl: {error}"]
    found = [] if lines.endswith(b"\n") else ["metrics.jsonl: the last line is torn"]
    if rounds != list(range(1, len(rounds) + 1)):
        missing = sorted(set(range(1, max(rounds, default=0) + 1)) - set(rounds))
        found.append(f"metrics.jsonl: rounds {missing[:5]} are missing")
    return found


def problems_of_checkpoints(directory: Path, last: int) -> list[str]:
    """What is wrong with the checkpoints of a node that ended after round `last`."""
    found = [f"{path.name} is left over" for path in sorted(directory.iterdir()) if path.name.startswith(".")]
    rounds = []
    for path in sorted(path for path in directory.iterdir() if not path.name.startswith(".")):
        rounds.append(int(path.name))
        try:
            files = json.loads((path / "manifest.json").read_text("utf-8"))["files"]
            present = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
            if present != {*files, "manifest.json"}:
                found.append(f"checkpoint {path.name}: its files are not those of its manifest")
            for name, expected in files.items():
                if hashlib.sha256((path / name).read_bytes()).hexdigest() != expected["sha256"]:
                    found.append(f"checkpoint {path.name}: {name} is damaged")
        except (OSError, ValueError, KeyError) as error:
            found.append(f"checkpoint {path.name}: {error!r}")
    if max(rounds, default=0) != last:
        found.append(f"the newest checkpoint is of round {max(rounds, default=0)}, not {last}")
    return found


def problems_of_pool(path: Path) -> list[str]:
    """What SQLite finds wrong with a pool."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as pool:
            lines = [str(line) for (line,) in pool.execute("PRAGMA integrity_check")]
            lines += [f"foreign key {row}" for row in pool.execute("PRAGMA foreign_key_check")]
    except sqlite3.DatabaseError as error:
        lines = [str(error)]
    return [f"pool.sqlite: {line}" for line in lines if line != "ok"]


def problems_of_files(data: DataDir, last: int) -> list[str]:
    """All of a data directory whose node ended after round `last`."""
    found = problems_of_record(data.metrics_path)
    found += (
        problems_of_checkpoints(data.checkpoints_path, last) if data.checkpoints_path.is_dir() else ["no checkpoint"]
    )
    found += problems_of_pool(data.pool_path)
    for path in (data.peers_path, data.reputation_path, data.contribution_path):
        try:
            json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            found.append(f"{path.name} is not there")
        except ValueError as error:
            found.append(f"{path.name}: {error}")
    for path in sorted(data.path.iterdir()):
        if path.name.endswith(".damaged") or path.name.startswith("."):
            found.append(f"{path.name} is left over")
    return found


def growth(samples: Sequence[Sample], since: float) -> tuple[float, float]:
    """By how many MB and files processes of one role have grown after `since`.

    One slope through the lives of all its processes, each with a level of its own and from where it has loaded, times
    the longest of these lives: the slope of short ones says little about a longer time.
    """
    lives: dict[int, list[Sample]] = {}
    for sample in samples:
        if sample.at >= since and sample.rounds >= WARM_ROUNDS:
            lives.setdefault(sample.pid, []).append(sample)
    times, memory, files = [], [], []
    longest = max((life[-1].at - life[0].at for life in lives.values()), default=0.0)
    for life in lives.values():
        columns = np.array([(sample.at, sample.rss / 2**20, sample.files) for sample in life])
        centred = columns - columns.mean(axis=0)
        times.append(centred[:, 0])
        memory.append(centred[:, 1])
        files.append(centred[:, 2])
    at = np.concatenate(times) if times else np.zeros(1)
    spread = float(at @ at)
    if spread == 0.0:
        return 0.0, 0.0
    slopes = [float(at @ np.concatenate(values)) / spread for values in (memory, files)]
    return slopes[0] * longest, slopes[1] * longest


def problems_of_growth(samples: Sequence[Sample], half: float) -> list[str]:
    """Which kinds of process of a node grow. `half`: seconds until the second half of the run."""
    found = []
    for role in sorted({sample.role for sample in samples}):
        memory, files = growth([sample for sample in samples if sample.role == role], half)
        if memory > MOST_MB:
            found.append(f"{role}: {memory:.0f} MB more")
        if files > MOST_FILES:
            found.append(f"{role}: {files:.0f} files more")
    return found


def problems_of_life(member: Member, healed_at: int) -> list[str]:
    """Of what a node did. `healed_at` is the round it had done when the last fault was healed."""
    found = [f"ended with status {end.status} at {end.at:.0f} s" for end in member.exits if end.why is None]
    if member.done < healed_at + PROGRESS:
        found.append(f"wedged: {member.done - healed_at} rounds since the last fault")
    if exchanged(member, healed_at) == 0:
        found.append("heard nothing since the last fault")
    if (most := max(member.again(), default=0)) > CHECKPOINT_EVERY:
        found.append(f"lost {most} rounds at once")
    if wrong := sorted(set(member.progress.rejected) - _HARMLESS):
        found.append(f"refused what honest nodes sent: {', '.join(wrong)}")
    if member.banned:
        found.append(f"bans {member.banned} honest nodes")
    if count := member.tracebacks():
        found.append(f"{count} tracebacks in {member.log.name}")
    return found


def exchanged(member: Member, healed_at: int) -> int:
    """Batches that came from others after that round."""
    return sum(step.received for step in member.progress.steps if step.round > healed_at)
