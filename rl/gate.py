"""The likelihood gate: what other nodes got right is learned from only if this node's policy might have said it.

A verifier that skips text around an answer rewards a right answer behind junk, and a policy that learns the junk is
ruined in a few rounds. Such text gives itself away: under the policy of whoever is to learn it, its tokens are far less
likely than anything this policy samples itself. Pure Python; the log-probs come from the pass that the update makes
anyway.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence

WINDOW = 512
"""Own completions that the threshold is taken from: the newest."""

LEAST = 16
"""Own completions without which nothing is known of what this policy says; until then nothing passes."""

TAIL = 0.05
"""Share of own completions that are less likely than `MARGIN` counts from. A smaller one lets an attack that has had
some success widen the gate for itself: the junk that a node has learned is among what it says."""

MARGIN = 1.75
"""So many times as unlikely as the tail of the own completions may be what others got right. In simulated swarms
(`bench.swarm`) it refuses about three in a thousand right answers of honest nodes."""

SURE = -1.0
"""The tail counts as no likelier than this: what a policy that is sure of itself would never say need not be junk."""


SPAN = 8
"""Tokens in a row that are looked at together: likely words around a few of junk must not hide them."""


def likelihood(logprobs: Sequence[float]) -> float:
    """Of the log-probs of a completion's tokens the least mean over `SPAN` in a row, or over all if there are fewer."""
    spans = (logprobs[at : at + SPAN] for at in range(max(1, len(logprobs) - SPAN + 1)))
    return min(math.fsum(span) / len(span) for span in spans)


class Gate:
    """Learns from own completions how unlikely they get, and refuses what is much less likely.

    What it is told of a completion is its `likelihood`, in nats, under this node's policy at temperature 1.
    """

    def __init__(self, known: Iterable[float] = ()) -> None:
        """`known` are likelihoods as `known` gave them, oldest first."""
        self._own: deque[float] = deque(known, maxlen=WINDOW)
        self._threshold: float | None = None

    def observe(self, likelihoods: Iterable[float]) -> None:
        """Take in those of completions that this node has just sampled itself."""
        self._own.extend(likelihoods)
        self._threshold = None

    @property
    def known(self) -> list[float]:
        """What the threshold comes from, oldest first: the whole state."""
        return list(self._own)

    @property
    def threshold(self) -> float:
        """The least likelihood that passes; infinite while too little is known."""
        if self._threshold is None:
            enough = len(self._own) >= LEAST
            self._threshold = MARGIN * min(SURE, self._tail()) if enough else math.inf
        return self._threshold

    def _tail(self) -> float:
        return sorted(self._own)[int(TAIL * len(self._own))]

    def refuses(self, likelihood: float) -> bool:
        """Whether a completion of another node with this likelihood is kept out of the update."""
        return not likelihood >= self.threshold
