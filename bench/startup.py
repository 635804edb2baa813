"""How long does one wait? `python -m bench.startup [--repeats 7] [--engines transformers vllm]`.

Wall-clock seconds from starting the program to its end (`--help`, `status` of a node that does not run and of one that
does), and from `swarmnode start --silo --model tiny` to the end of its first round, with each engine. One pass before
the measurements warms the disk's cache. The commands and the starts take turns, so that what else the machine does
falls on all alike. `processor` is what the command itself computed, without the processes below a node.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.nodes import ISOLATED, NodeFailed, environment, failed, running
from node.record import MetricsFile

ROUND = "first round"

LIMITS = {"help": 0.3, "status": 0.5, "status of a running node": 0.5, ROUND: 15.0}
"""Seconds that an operator should not have to wait longer than."""

_START_SECONDS = 300.0
_POLL_SECONDS = 0.005


@dataclass
class Times:
    """Of one thing that is waited for, a value a repeat."""

    limit: float
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def row(self, name: str) -> str:
        """A line of the table."""
        middle = statistics.median(self.seconds)
        processor = f"{statistics.median(self.processor):.2f}" if self.processor else ""
        spread = f"{min(self.seconds):.2f} to {max(self.seconds):.2f}"
        return f"| {name} | {middle:.2f} | {spread} | {processor} | {self.limit:g} | {middle / self.limit:.0%} |"


def timed(words: Sequence[str], times: Times) -> None:
    """Run a command of `swarmnode` that ends by itself. Raises NodeFailed."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "node.cli", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=environment(),
    )
    _, status, usage = os.wait4(process.pid, 0)
    times.seconds.append(time.perf_counter() - begun)
    times.processor.append(usage.ru_utime + usage.ru_stime)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise NodeFailed(f"swarmnode {' '.join(words)} ended with status {process.returncode}")


def start_words(data_dir: Path, engine: str) -> list[str]:
    """The node whose first round is waited for, by the product's own settings."""
    words = ["start", "--silo", "--model", "tiny", "--engine", engine, "--no-tty", "--data-dir", str(data_dir)]
    return [*words, *ISOLATED, "--set", "api.port=0"]


def first_round(data_dir: Path, engine: str, status: Times) -> float:
    """Seconds until a new node's first round is recorded. Then its status is asked, and it is told to stop.

    Raises NodeFailed.
    """
    log, record = data_dir.with_suffix(".log"), MetricsFile(data_dir / "metrics.jsonl")
    words = start_words(data_dir, engine)
    begun = time.time()
    with running(words, log) as process:
        while not record.last(1):
            if process.poll() is not None or time.time() - begun > _START_SECONDS:
                raise failed(words, log, "had no first round")
            time.sleep(_POLL_SECONDS)
        timed(["status", "--data-dir", str(data_dir)], status)
        process.send_signal(signal.SIGTERM)
        if process.wait(_START_SECONDS) != 0:
            raise failed(words, log, f"ended with status {process.returncode}")
    return next(record.read()).time - begun


def measure(directory: Path, engines: Sequence[str], repeats: int, warm: bool) -> dict[str, Times]:
    """Everything, `repeats` times in turn, after a pass that does not count if `warm`. Raises NodeFailed."""
    names = [name for name in LIMITS if name != ROUND] + [f"{ROUND}, {engine}" for engine in engines]
    times: dict[str, Times] = {}
    for number in range(repeats + warm):
        if number == 0 or (number == 1 and warm):
            times = {name: Times(LIMITS[name.partition(",")[0]]) for name in names}
        for engine in engines:
            data_dir = directory / f"{engine}-{number}"
            seconds = first_round(data_dir, engine, times["status of a running node"])
            times[f"{ROUND}, {engine}"].seconds.append(seconds)
            timed(["status", "--data-dir", str(data_dir)], times["status"])
            timed(["--help"], times["help"])
    return times


def table(times: dict[str, Times]) -> str:
    """Markdown."""
    head = ["| waiting for | seconds, median | range | processor | limit | of the limit |", "|---" * 6 + "|"]
    return "\n".join([*head, *(each.row(name) for name, each in times.items())])


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each")
    parser.add_argument("--engines", nargs="+", choices=["transformers", "vllm"], default=["transformers"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all measurements to this file")
    parser.add_argument("--smoke", action="store_true", help="one measurement of each, in ten seconds")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    try:
        with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as directory:
            times = measure(
                Path(directory), arguments.engines, 1 if arguments.smoke else arguments.repeats, not arguments.smoke
            )
    except NodeFailed as error:
        sys.exit(f"error: {error}")
    print(table(times))
    if arguments.json:
        found = {name: {"seconds": t.seconds, "processor": t.processor, "limit": t.limit} for name, t in times.items()}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
