"""What an operator sees while a node runs: a live view on a terminal, plain log lines elsewhere.

Completions and log lines may hold text of strangers; `node.text.clean` makes it harmless before any of it reaches a
terminal.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from node import logs
from node.config import LogSettings
from node.record import Record, tokens_per_second
from node.snapshot import Snapshot
from rl.rollouts import ScoredGroup

_SPOKEN_SECONDS = 30.0
"""How often the plain view reports on one phase that takes long."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What stays the same while a learner lives. `rounds` is None for a run without an end."""

    node_id: str
    name: str
    model: str
    device: str
    engine: str
    data_dir: str
    done: int
    rounds: int | None


class View(Protocol):
    """Told what happens, from the main thread. Never raises because of what it is told, and never waits for long."""

    def started(self, info: NodeInfo) -> None:
        """A learner is ready: at the start of the node, and again after one died."""
        ...

    def phase(self, name: str) -> None:
        """Something else begins: `load model`, `draw`, `generate`, `score`, `share`, `mix`, `update`, `checkpoint`,
        `evaluate`.
        """
        ...

    def progress(self, done: int, total: int, unit: str) -> None:
        """How far the phase is. `total` is 0 where nobody knows."""
        ...

    def round_finished(self, record: Record, per_kind: Mapping[str, float], groups: Sequence[ScoredGroup]) -> None:
        """A round is recorded. `per_kind` is the mean reward of each kind of task in it."""
        ...

    def network(self, snapshot: Snapshot) -> None:
        """How the swarm stands, about once a second; never in a node that trains alone."""
        ...

    def message(self, level: str, text: str) -> None:
        """Something worth a line in the log; `level` is debug, info, warning, error or critical."""
        ...


@contextmanager
def open_view(settings: LogSettings) -> Iterator[View]:
    """The view that fits the settings and the terminal; the log goes where it shows. It ends with the block."""
    if settings.format == "json" or settings.view == "plain" or not sys.stderr.isatty():
        logs.configure(settings)
        yield PlainView()
        return
    from node.live import LiveView, terminal

    console = terminal()
    if console is None:
        logs.configure(settings)
        yield PlainView()
        return
    with LiveView(console) as view:
        logs.configure(settings, view.log_line)
        try:
            yield view
        finally:
            logs.configure(settings)


class PlainView:
    """Log lines through structlog: one a round, and one now and then in a long phase."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = logs.get()
        self._clock = clock
        self._phase = ""
        self._spoken = clock()
        self._rounds: int | None = None
        self._networked = False

    def started(self, info: NodeInfo) -> None:
        """See `View`."""
        self._rounds = info.rounds
        self._log.info(
            "node started",
            node=info.node_id,
            **({"name": info.name} if info.name else {}),
            model=info.model,
            device=info.device,
            engine=info.engine,
            data_dir=info.data_dir,
            rounds_done=info.done,
        )

    def phase(self, name: str) -> None:
        """See `View`."""
        self._phase = name
        self._spoken = self._clock()
        self._log.debug("phase", name=name)

    def progress(self, done: int, total: int, unit: str) -> None:
        """See `View`."""
        if self._clock() - self._spoken >= _SPOKEN_SECONDS:
            self._spoken = self._clock()
            self._log.info(self._phase, done=done, **({"of": total} if total else {}), unit=unit)

    def round_finished(self, record: Record, per_kind: Mapping[str, float], groups: Sequence[ScoredGroup]) -> None:
        """See `View`."""
        self._log.info(
            "round",
            round=record.round if self._rounds is None else f"{record.round}/{self._rounds}",
            reward=round(record.reward_local, 4),
            informative=round(record.informative_fraction, 2),
            tokens=record.tokens_generated,
            tokens_per_second=round(tokens_per_second([record])),
            generate_s=round(record.seconds_generate, 2),
            score_s=round(record.seconds_score, 2),
            update_s=round(record.seconds_update, 2),
            **(self._of_others(record) if self._networked else {}),
            **({"rejected": record.rejected} if record.rejected else {}),
            **({"gate_refused": record.gate_refused} if record.gate_refused else {}),
        )

    def network(self, snapshot: Snapshot) -> None:
        """See `View`."""
        self._networked = True

    def _of_others(self, record: Record) -> dict[str, int | float]:
        reward = {} if record.reward_external is None else {"reward_external": round(record.reward_external, 4)}
        return {"external": record.external_groups, **reward, "peers": record.peers}

    def message(self, level: str, text: str) -> None:
        """See `View`."""
        getattr(self._log, level)(text)
