"""What gossip thinks of a peer: penalties that fade, and the thresholds below which it is not listened to."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MESH = 0.0
"""Below it a peer is not in the mesh."""
GOSSIP = -10.0
"""Below it nothing is offered to a peer nor asked of it."""
GRAYLIST = -80.0
"""Below it nothing that a peer sends is looked at."""

_INVALID_WEIGHT = -10.0
_BEHAVIOUR_WEIGHT = -5.0
_BEHAVIOUR_FREE = 6.0  # races and restarts cost honest peers some of these
_FIRST_WEIGHT, _FIRST_CAP = 0.01, 1.0  # little, so that no credit buys an invalid message
_FADE = 0.985  # a second: half is gone in 46 s
_REMEMBERED = 1024


@dataclass
class Marks:
    """One peer's counters: invalid messages (P4), broken manners (P7), messages it brought first (P2)."""

    invalid: float = 0.0
    behaviour: float = 0.0
    first: float = 0.0

    def fade(self) -> None:
        """One second passes."""
        self.invalid = self.invalid * _FADE if self.invalid > 0.1 else 0.0
        self.behaviour = self.behaviour * _FADE if self.behaviour > 0.1 else 0.0
        self.first *= _FADE


class Scores:
    """Marks of peers, kept over reconnections."""

    def __init__(self, app: Callable[[str], float] | None) -> None:
        self._app = app
        self._marks: OrderedDict[str, Marks] = OrderedDict()

    def __getitem__(self, peer: str) -> Marks:
        """A peer's counters, to add to."""
        marks = self._marks.get(peer)
        if marks is None:
            marks = self._marks[peer] = Marks()
            if len(self._marks) > _REMEMBERED:
                self._marks.popitem(last=False)
        self._marks.move_to_end(peer)
        return marks

    def score(self, peer: str) -> float:
        """The sum; 0 is neutral."""
        app = self._app(peer) if self._app is not None else 0.0
        marks = self._marks.get(peer)
        if marks is None:
            return app
        manners = max(0.0, marks.behaviour - _BEHAVIOUR_FREE)
        return (
            app
            + _INVALID_WEIGHT * marks.invalid**2
            + _BEHAVIOUR_WEIGHT * manners**2
            + min(_FIRST_CAP, _FIRST_WEIGHT * marks.first)
        )

    def fade(self) -> None:
        """One second passes."""
        for marks in self._marks.values():
            marks.fade()
