"""The live terminal view: what the node is doing, how well, and where the time goes, on one screen of any size."""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from node import logs
from node.record import Record, tokens_per_second
from node.snapshot import Snapshot
from node.text import clean
from node.view import NodeInfo
from p2p.ids import short
from rl.rollouts import ScoredGroup

REFRESHES_PER_SECOND = 4

_BLOCKS = "▁▂▃▄▅▆▇█"
_HISTORY = 2000
"""Rounds the reward curve looks back."""
_RECENT = 20
"""Rounds that the averages look back."""
_KIND_GROUPS = 64
"""Groups of one kind of task that its success looks back."""
_SAMPLES = 3
_BAR = 24
_LOG = 2
"""Log lines that kinds of task and samples leave room for."""
_ECHO = 4
"""Cells that stay free behind the last line: an echoed `^C` that wrapped would shift the next redraw by a line."""
_ENDED = "ended"


def terminal() -> Console | None:
    """The terminal on stderr; None if it cannot move its cursor or show the characters of this view."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal or not console.encoding.lower().startswith("utf"):
        return None
    return console


@dataclass(frozen=True, slots=True)
class _Sample:
    kind: str
    prompt: str
    completion: str
    reward: float


class LiveView:
    """`node.view.View` on a terminal. Redraws itself from a thread of its own, so it lives while the node is busy."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # Held for every look at the fields below; never while writing to the console, whose own lock the thread holds.
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._info: NodeInfo | None = None
        self._phase = "start"
        self._phase_begun = self._begun
        self._progress: tuple[int, int, str] | None = None
        self._rewards: deque[float] = deque(maxlen=_HISTORY)
        self._records: deque[Record] = deque(maxlen=_RECENT)
        self._kinds: dict[str, deque[float]] = {}
        self._samples: list[_Sample] = []
        self._snapshot: Snapshot | None = None
        self._lines: deque[tuple[int, str]] = deque(maxlen=200)
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=REFRESHES_PER_SECOND,
            vertical_overflow="crop",
        )

    def __enter__(self) -> "LiveView":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.phase(_ENDED)
        self._live.stop()

    def started(self, info: NodeInfo) -> None:
        """See `node.view.View`."""
        with self._lock:
            self._info = info

    def phase(self, name: str) -> None:
        """See `node.view.View`."""
        with self._lock:
            self._phase, self._phase_begun, self._progress = name, time.monotonic(), None

    def progress(self, done: int, total: int, unit: str) -> None:
        """See `node.view.View`."""
        with self._lock:
            self._progress = (done, total, unit)

    def round_finished(self, record: Record, per_kind: Mapping[str, float], groups: Sequence[ScoredGroup]) -> None:
        """See `node.view.View`."""
        with self._lock:
            # Rounds that a crash took back come again.
            while self._records and self._records[-1].round >= record.round:
                self._records.pop()
                if self._rewards:
                    self._rewards.pop()
            self._records.append(record)
            self._rewards.append(record.reward_local)
            for scored in groups:
                kind = self._kinds.setdefault(scored.group.task.kind, deque(maxlen=_KIND_GROUPS))
                kind.append(scored.mean_reward)
            self._samples = [_best(scored) for scored in groups[:_SAMPLES]]

    def network(self, snapshot: Snapshot) -> None:
        """See `node.view.View`."""
        with self._lock:
            self._snapshot = snapshot

    def message(self, level: str, text: str) -> None:
        """See `node.view.View`."""
        getattr(logs.get(), level)(text)

    def log_line(self, level: int, text: str) -> None:
        """Show a finished log line; from warnings on it also stays in the terminal's scrollback."""
        with self._lock:
            self._lines.extend((level, clean(line)) for line in text.splitlines())
        if level >= logging.WARNING:
            for line in text.splitlines():
                self._console.print(Text(clean(line), style=_style(level)), soft_wrap=True)

    def _render(self) -> Group:
        width, height = self._console.size
        with self._lock:
            lines = self._screen(width, max(1, height - 1))
        for line in lines:
            free = 1 + (_ECHO if line is lines[-1] else 0)
            line.truncate(max(1, width - free), overflow="ellipsis")
            line.no_wrap = True
        return Group(*lines)

    def _screen(self, width: int, height: int) -> list[Text]:
        """At most `height` lines. The head comes first; tasks, samples and log share what is left."""
        head = [self._identity(), self._round(), self._phase_line(), self._reward(width), self._time(), self._groups()]
        if self._snapshot is not None:
            head.append(self._swarm(self._snapshot))
        room = max(0, height - len(head) - 3)
        spared = _LOG if self._snapshot is None else _LOG - 1
        self._append_data_dir(head, width)
        kinds = self._kind_lines(min(len(self._kinds), max((room + 1) // 2, room - len(self._samples) - spared)))
        left = room - len(kinds)
        samples = self._sample_lines()[: max(0, left // 2, left - spared)]
        log = self._log_lines(max(0, height - len(head) - len(kinds) - len(samples) - 3))
        parts = [head, kinds, samples, log]
        screen: list[Text] = []
        for part in parts:
            if part:
                screen += [Text("─" * (width - 1), style="dim"), *part] if screen else part
        return screen[:height]

    def _identity(self) -> Text:
        text = Text("swarmnode ", style="bold")
        if self._info is None:
            return text.append("starting", style="dim")
        info = self._info
        for word in (short(info.node_id), clean(info.name), clean(info.model), info.device, info.engine):
            if word:
                text.append(f" {word} ", style="cyan")
        return text

    def _append_data_dir(self, head: Sequence[Text], width: int) -> None:
        """Put the data directory behind one of the first two lines, if it fits there whole."""
        if self._info is None:
            return
        text = Text(f"   {clean(self._info.data_dir)}", style="dim")
        for line in head[:2]:
            if line.cell_len + text.cell_len < width:
                line.append_text(text)
                return

    def _round(self) -> Text:
        done = self._records[-1].round if self._records else self._info.done if self._info else 0
        total = self._info.rounds if self._info else None
        text = Text(f"round {done}" + (f"/{total}" if total is not None else ""), style="bold")
        text.append(f"   up {_clock(time.monotonic() - self._begun)}", style="default")
        if self._records:
            text.append(f"   {tokens_per_second(self._records):.0f} tokens/s", style="default")
        return text

    def _phase_line(self) -> Text:
        text = Text(f"{self._phase:<11}", style="yellow")
        if self._phase == _ENDED:
            return text
        if self._progress is not None and self._progress[1] > 0:
            done, total, unit = self._progress
            filled = min(_BAR, _BAR * done // total)
            text.append("━" * filled, style="green").append("━" * (_BAR - filled), style="dim")
            text.append(f" {done}/{total} {unit}", style="default")
        return text.append(f"  {_clock(time.monotonic() - self._phase_begun)}", style="dim")

    def _reward(self, width: int) -> Text:
        text = _label("reward")
        if not self._rewards:
            return text.append("no round yet", style="dim")
        recent = [record.reward_local for record in self._records]
        text.append(f"{self._rewards[-1]:.3f}  mean of {len(recent)}: {sum(recent) / len(recent):.3f}  ")
        return text.append(sparkline(self._rewards, max(1, width - len(text) - 2)), style="green")

    def _time(self) -> Text:
        text = _label("time")
        parts = {
            "generate": sum(record.seconds_generate for record in self._records),
            "score": sum(record.seconds_score for record in self._records),
            "update": sum(record.seconds_update for record in self._records),
        }
        whole = sum(parts.values())
        if whole == 0:
            return text.append("no round yet", style="dim")
        return text.append("   ".join(f"{name} {seconds / whole:.0%}" for name, seconds in parts.items()))

    def _groups(self) -> Text:
        text = _label("groups")
        if not self._records:
            return text.append("no round yet", style="dim")
        record = self._records[-1]
        informative = round(record.informative_fraction * record.local_groups)
        text.append(f"{informative} of {record.local_groups} informative")
        if self._snapshot is not None:
            text.append(f"   {record.external_groups} of others")
            if record.reward_external is not None:
                text.append(f", reward {record.reward_external:.3f} (own {record.reward_local:.3f})")
        refused = [f"{clean(reason)} {count}" for reason, count in record.rejected.items()]
        if record.gate_refused:
            refused.append(f"by the gate {record.gate_refused}")
        if refused:
            text.append(f"   rejected: {', '.join(refused)}", style="red")
        return text

    def _swarm(self, snapshot: Snapshot) -> Text:
        """Counts since the node's start."""
        text = _label("swarm")
        nodes = f"{snapshot.connected} node{'' if snapshot.connected == 1 else 's'}"
        text.append(nodes, style="default" if snapshot.connected else "yellow").append(f", mesh {snapshot.mesh}")
        text.append(f"   sent {snapshot.sent}   received {snapshot.received}   admitted {snapshot.admitted}")
        rejected = sum(snapshot.rejected.values())
        return text.append(f"   rejected {rejected}", style="red" if rejected else "default")

    def _kind_lines(self, count: int) -> list[Text]:
        shown = sorted(self._kinds)[:count]
        hidden = len(self._kinds) - len(shown)
        lines = []
        for kind in shown:
            success = sum(self._kinds[kind]) / len(self._kinds[kind])
            filled = round(_BAR * min(1.0, max(0.0, success)))
            line = Text(f"{clean(kind)[:27]:<28}{success:6.1%}  ")
            lines.append(line.append("█" * filled, style="green"))
        if hidden and lines:
            lines[-1] = Text(f"and {hidden + 1} more kinds of task", style="dim")
        return lines

    def _sample_lines(self) -> list[Text]:
        lines = []
        for sample in self._samples:
            text = Text(f"{sample.reward:4.2f} ", style="green" if sample.reward > 0 else "red")
            text.append(f"{sample.kind} ", style="cyan").append(f"…{sample.prompt[-40:]} → ", style="dim")
            lines.append(text.append(sample.completion or "(nothing)"))
        return lines

    def _log_lines(self, count: int) -> list[Text]:
        return [Text(line, style=_style(level)) for level, line in list(self._lines)[-count:]] if count else []


def sparkline(values: Sequence[float] | deque[float], width: int) -> str:
    """`values`, from 0 to the largest, as at most `width` block characters; each stands for the mean of its share."""
    count = min(len(values), width)
    if count == 0:
        return ""
    numbers = list(values)
    edges = [len(numbers) * place // count for place in range(count + 1)]
    means = [sum(numbers[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    top = max(1e-9, *means)
    return "".join(_BLOCKS[round(max(0.0, mean) / top * (len(_BLOCKS) - 1))] for mean in means)


def _label(name: str) -> Text:
    return Text.assemble((f"{name:<11}", "bold"))


def _best(scored: ScoredGroup) -> _Sample:
    reward, completion = max(zip(scored.rewards, scored.group.completions, strict=True), key=lambda pair: pair[0])
    task = scored.group.task
    return _Sample(clean(task.kind), clean(task.prompt[-400:]), clean(completion.text[:400]), reward)


def _style(level: int) -> str:
    return "red" if level >= logging.ERROR else "yellow" if level >= logging.WARNING else "dim"


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
