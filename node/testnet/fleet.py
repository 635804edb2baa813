"""The nodes of a testnet as processes: started, watched, killed for show, stopped, and never left behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn

import trio

from node.background import background
from node.stop import Stop, watch_signals
from node.testnet.plan import NodePlan
from node.testnet.watch import LogTail, Progress
from verifiers import launch
from verifiers.process import Group

_SAVED_ROUNDS = 10
"""Rounds in which a node writes a checkpoint, by default. One that is killed sooner each time would never be done."""

State = Literal["starting", "training", "stopping", "killed", "done", "stopped", "failed"]

Say = Callable[[str, str], None]
"""Told a level and a line."""

_RESTART_SECONDS = 1.0
_STOP_SECONDS = 60.0
"""How long a node may take to save and end: several that save at once on one disk are slow."""

_MAX_FRUITLESS = 3
"""Times that a node may be killed from outside without finishing a round, until it counts as failed."""

_LOOK_SECONDS = 0.25


class Member:
    """One node of the testnet and its process, which may be replaced."""

    def __init__(self, plan: NodePlan) -> None:
        self.plan = plan
        self.state: State = "starting"
        self.status: int | None = None
        """Exit status of the node when it ended for good; negative for a signal."""
        self.kills = 0
        self.progress = Progress(plan.data_dir)
        self.log = LogTail(plan.log)
        self.progress.read()
        self._group: Group | None = None
        self._begun_at = self.progress.round

    @property
    def pid(self) -> int | None:
        """Process id; None while there is no process."""
        return self._group.pid if self._group is not None else None

    @property
    def moved(self) -> bool:
        """Whether it has finished a round since it was last started."""
        return self.progress.round != self._begun_at

    @property
    def settled(self) -> bool:
        """Whether it has come so far since it was last started that a kill does not take it all back again."""
        return self.state == "training" and self.progress.round >= self._begun_at + _SAVED_ROUNDS

    def start(self) -> None:
        """Start the process. Raises OSError. To be called from the main thread, at whose end the kernel kills it."""
        self.progress.read()
        self._begun_at = self.progress.round
        with self.plan.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *self.plan.command(self.kills > 0)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A Ctrl-C at the terminal is the testnet's alone.
                start_new_session=True,
            )
        self._group = Group(process)
        self.state = "starting"

    def look(self) -> None:
        """Take in what the node has written."""
        self.progress.read()
        if self.state == "starting" and self.moved:
            self.state = "training"

    def signal(self, number: int) -> None:
        """Send a signal to the node, if it runs."""
        if self._group is not None:
            self._group.signal(number)

    async def wait(self) -> int:
        """Wait until the process has ended. Returns its exit status."""
        if self._group is None:
            raise ValueError(f"{self.plan.name} has not been started")
        status = await self._group.wait()
        self._group = None
        return status

    async def kill(self) -> None:
        """End the process and reap it, whatever it is doing."""
        if self._group is not None:
            self.status = await self._group.kill()
            self._group = None


class Fleet:
    """Runs the nodes until all have ended by themselves or were told to."""

    def __init__(self, plans: Sequence[NodePlan], say: Say, kill_every: float | None, choice: random.Random) -> None:
        self.members = [Member(plan) for plan in plans]
        self._say = say
        self._kill_every = kill_every
        self._choice = choice
        self._stop = Stop()
        self._moved = False

    async def run(self, on_look: Callable[[], None]) -> None:
        """Returns when the last node has ended. `on_look` is called some times a second.

        A second signal raises KeyboardInterrupt. Raises OSError if a node cannot be started. No process is left.
        """
        try:
            async with background() as nursery:
                await nursery.start(watch_signals, self._stop, self._tell_stop)
                nursery.start_soon(self._look, on_look)
                nursery.start_soon(self._stop_all)
                if self._kill_every is not None:
                    nursery.start_soon(self._kill_some, self._kill_every)
                async with trio.open_nursery() as lives:
                    for member in self.members:
                        # All in one go, so that the nodes load side by side; they wait for each other.
                        member.start()
                        lives.start_soon(self._live, member)
        finally:
            with trio.CancelScope(shield=True):
                for member in self.members:
                    await member.kill()
        for member in self.members:
            member.look()
        on_look()

    async def _live(self, member: Member) -> None:
        """One node until it ends for good; one that is killed is started again."""
        fruitless = 0
        while True:
            status = await member.wait()
            member.look()
            fruitless = 0 if member.moved else fruitless + 1
            if status >= 0 or self._stop.requested or fruitless == _MAX_FRUITLESS:
                break
            member.kills += 1
            member.state = "killed"
            self._say("warning", f"{member.plan.name} was {how(status)}; it starts again")
            with self._stop.interruptible():
                await trio.sleep(_RESTART_SECONDS)
                member.start()
            if member.pid is None:
                break
        self._ended(member, status)

    def _ended(self, member: Member, status: int) -> None:
        # One that was killed for show, or told to stop before it could listen, has done what it was asked.
        asked = self._stop.requested and (member.state == "killed" or status == -signal.SIGTERM)
        member.status = 0 if asked else status
        if member.status == 0:
            member.state = "stopped" if self._stop.requested else "done"
            self._say("info", f"{member.plan.name} {member.state} after round {member.progress.round}")
            return
        member.state = "failed"
        self._say("error", f"{member.plan.name} failed ({how(status)}): see {member.plan.log}")
        if not self._moved and not self._stop.requested:
            self._say("error", "no node has finished a round yet: stopping the others")
            self._stop.request()

    async def _look(self, on_look: Callable[[], None]) -> NoReturn:
        while True:
            for member in self.members:
                member.look()
            self._moved = self._moved or any(member.state == "training" for member in self.members)
            on_look()
            await trio.sleep(_LOOK_SECONDS)

    async def _kill_some(self, seconds: float) -> NoReturn:
        """Kill a node that is well under way, now and then."""
        while True:
            await trio.sleep(seconds)
            training = [member for member in self.members if member.settled and member.pid is not None]
            if training and not self._stop.requested:
                self._choice.choice(training).signal(signal.SIGKILL)

    async def _stop_all(self) -> None:
        """When told to, ask all nodes to end, and kill those that do not in time."""
        with self._stop.interruptible():
            await trio.sleep_forever()
        for member in self.members:
            if member.pid is not None:
                member.state = "stopping"
                member.signal(signal.SIGTERM)
        await trio.sleep(_STOP_SECONDS)
        for member in self.members:
            if member.pid is not None:
                self._say("error", f"{member.plan.name} does not end within {_STOP_SECONDS:.0f} s: killed")
                member.signal(signal.SIGKILL)

    def _tell_stop(self, level: str, text: str) -> None:
        self._say("info", "stopping: each node saves its last finished round; a second Ctrl-C kills them")


def how(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-status, f'signal {-status}')}"


def clock(begun: float) -> str:
    """Time since `begun` (`time.monotonic`), as in 0:01:12."""
    whole = int(time.monotonic() - begun)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
