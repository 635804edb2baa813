"""Does faults to nodes, and takes them back."""

import signal
from collections.abc import Sequence

from bench.chaos.clock import write_offset
from bench.chaos.members import Member
from bench.chaos.place import Place
from bench.chaos.plan import Fault


class World:
    """The faults that are in force. Times are seconds of the run."""

    def __init__(self, place: Place, members: Sequence[Member]) -> None:
        self._place = place
        self._members = {member.number: member for member in members}
        self._now: list[Fault] = []
        self.done: list[Fault] = []

    def begin(self, fault: Fault) -> None:
        """Do it."""
        self._now.append(fault)
        for node in fault.nodes:
            self._members[node].ills.add(fault.kind)
        if fault.kind == "partition":
            self._place.part(fault.nodes)
            return
        [node] = fault.nodes
        if fault.kind == "kill":
            self._members[node].kill(fault.end)
        elif fault.kind == "learner":
            self._members[node].kill_learner()
        else:
            self._turn(fault, node, True)

    def look(self, now: float) -> None:
        """Keep disks full, and take back what is over."""
        for fault in self._now:
            if fault.kind == "full":
                self._place.fill(fault.nodes[0], True)
        for fault in [fault for fault in self._now if now >= fault.end]:
            self._end(fault)

    def heal(self) -> None:
        """Take back everything."""
        for fault in list(self._now):
            self._end(fault)

    def _end(self, fault: Fault) -> None:
        self._now.remove(fault)
        self.done.append(fault)
        for node in fault.nodes:
            self._members[node].ills.discard(fault.kind)
        if fault.kind == "partition":
            self._place.part(())
        elif fault.kind not in ("kill", "learner"):
            self._turn(fault, fault.nodes[0], False)

    def _turn(self, fault: Fault, node: int, on: bool) -> None:
        member = self._members[node]
        if fault.kind == "stop":
            member.signal(signal.SIGSTOP if on else signal.SIGCONT)
        elif fault.kind == "slow":
            self._place.slow(node, on)
        elif fault.kind == "full":
            self._place.fill(node, on)
        elif fault.kind == "read-only":
            self._place.lock(node, on)
        elif fault.kind == "clock":
            write_offset(member.clock, fault.amount if on else 0.0)
