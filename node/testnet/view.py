"""One view over all nodes of a testnet: a row a node on a terminal, plain lines elsewhere."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging import ERROR, INFO, WARNING
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from node import logs
from node.config import LogSettings
from node.datadir import DataDir
from node.live import sparkline, terminal
from node.snapshot import read_snapshot
from node.testnet.fleet import Member, clock
from node.testnet.table import rejections, reward
from node.testnet.watch import MEAN, Step, mean_reward
from node.text import clean

_SPOKEN_SECONDS = 5.0
"""How often the plain view says how far the nodes are."""

_HEAD = "node     state     round      reward  groups  peers     sent  received  rejected"

_LEVELS = {"warning": WARNING, "error": ERROR, "critical": ERROR}
_STYLES = {WARNING: "yellow", ERROR: "red"}
_STATES = {"training": "green", "killed": "red", "failed": "red", "done": "bold green"}


class FleetView(Protocol):
    """Told what happens, from the main thread."""

    def say(self, level: str, text: str) -> None:
        """Something about the testnet itself."""
        ...

    def look(self, members: Sequence[Member]) -> None:
        """Show how far the nodes are. Called some times a second."""
        ...


@contextmanager
def open_view(plain: bool, title: str, rounds: int | None) -> Iterator[FleetView]:
    """The view that fits the terminal. It ends with the block, the last frame stays."""
    console = None if plain else terminal()
    if console is None:
        logs.configure(LogSettings())
        yield PlainView()
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield ScreenView(console, live, title, rounds)


class PlainView:
    """A log line every few seconds, and one for each thing that happens."""

    def __init__(self) -> None:
        self._log = logs.get()
        self._spoken = time.monotonic()

    def say(self, level: str, text: str) -> None:
        """See `FleetView`."""
        getattr(self._log, level)(text)

    def look(self, members: Sequence[Member]) -> None:
        """See `FleetView`."""
        for member in members:
            for level, text in member.log.read():
                # At first they warn of each other, since none answers before it has started.
                if level in _LEVELS and (level != "warning" or member.state != "starting"):
                    self.say(level, f"{member.plan.name}: {text}")
        if time.monotonic() - self._spoken >= _SPOKEN_SECONDS:
            self._spoken = time.monotonic()
            rounds = [str(member.progress.round) for member in members]
            total = Total(members)
            self._log.info(
                "rounds " + " ".join(rounds),
                reward=reward(total.reward),
                external_groups=total.external,
                sent=total.sent,
                received=total.received,
                rejected=rejections(total.rejected),
            )


class Total:
    """Sums over all nodes; the reward is the mean of their last 50 rounds."""

    def __init__(self, members: Sequence[Member]) -> None:
        steps = [step for member in members for step in member.progress.steps]
        self.reward = mean_reward([step for member in members for step in member.progress.steps[-MEAN:]])
        self.external = sum(step.external for step in steps)
        self.sent = sum(step.sent for step in steps)
        self.received = sum(step.received for step in steps)
        self.rejected: dict[str, int] = {}
        for member in members:
            for reason, count in member.progress.rejected.items():
                self.rejected[reason] = self.rejected.get(reason, 0) + count


class ScreenView:
    """A row a node, a row for all, and what the nodes have said last."""

    def __init__(self, console: Console, live: Live, title: str, rounds: int | None) -> None:
        self._console = console
        self._live = live
        self._title = title
        self._rounds = rounds
        self._begun = time.monotonic()
        self._lines: deque[tuple[int, str]] = deque(maxlen=100)

    def say(self, level: str, text: str) -> None:
        """See `FleetView`."""
        self._lines.extend((_LEVELS.get(level, INFO), clean(line)) for line in text.splitlines())

    def look(self, members: Sequence[Member]) -> None:
        """See `FleetView`."""
        for member in members:
            for level, text in member.log.read():
                self._lines.append((_LEVELS.get(level, INFO), f"{member.plan.name}: {clean(text)}"))
        self._live.update(self._screen(members), refresh=True)

    def _screen(self, members: Sequence[Member]) -> Group:
        width, height = self._console.size
        title = Text("swarmnode testnet", style="bold").append(
            f"   {len(members)} nodes   up {clock(self._begun)}   {clean(self._title)}", style="default"
        )
        lines = [title, Text(_HEAD, style="dim"), *(self._row(member, width) for member in members), _total(members)]
        room = height - 1 - len(lines) - 1
        if room > 0 and self._lines:
            lines.append(Text("─" * max(1, width - 1), style="dim"))
            lines += [Text(line, style=_STYLES.get(level, "dim")) for level, line in list(self._lines)[-room:]]
        for line in lines:
            line.truncate(max(1, width - 1), overflow="ellipsis")
            line.no_wrap = True
        return Group(*lines[: max(1, height - 1)])

    def _row(self, member: Member, width: int) -> Text:
        steps = member.progress.steps
        last: Step | None = steps[-1] if steps else None
        done = f"{member.progress.round}" + (f"/{self._rounds}" if self._rounds is not None else "")
        rejected = member.progress.rejected.total()
        text = Text(f"{member.plan.name:<9}").append(f"{member.state:<10}", style=_STATES.get(member.state, "dim"))
        text.append(f"{done:<11}{reward(mean_reward(steps[-10:])):<8}")
        text.append(f"{f'{last.local}+{last.external}' if last else '-':<8}{_peers(member, last):<8}")
        text.append(f"{sum(step.sent for step in steps):>6}{sum(step.received for step in steps):>10}")
        text.append(f"{rejected:>10}", style="red" if rejected else "default")
        text.append("  ").append(sparkline([step.reward for step in steps], max(0, width - len(text) - 2)), "green")
        return text


def _peers(member: Member, last: Step | None) -> str:
    """Connected nodes, and in brackets how many of them gossip goes to directly."""
    snapshot = read_snapshot(DataDir(member.plan.data_dir).swarm_path, member.pid)
    if snapshot is not None:
        return f"{snapshot.connected} ({snapshot.mesh})"
    return str(last.peers) if last is not None else "-"


def _total(members: Sequence[Member]) -> Text:
    total = Total(members)
    text = Text(f"{'all':<30}{reward(total.reward):<8}{'':<16}{total.sent:>6}{total.received:>10}", style="bold")
    if total.rejected:
        return text.append(f"  rejected: {rejections(total.rejected)}", style="red")
    return text.append(f"{0:>10}")
