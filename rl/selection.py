"""Which external groups enter a round: strategies that choose among the candidates of the pool."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """An external group that may be trained on, without its texts: those are read for the chosen ones alone.

    `id` is its key in the pool, `round` the round of this node in which it came, `reward` the mean of its rewards by
    this node's verifiers, `uses` how many rounds have trained on it. All candidates are informative.
    """

    id: int
    origin: str
    round: int
    kind: str
    completions: int
    reward: float
    uses: int


class Selection(Protocol):
    """A strategy. The same candidates and the same state of `random` give the same choice."""

    def choose(self, candidates: Sequence[Candidate], count: int, per_peer: int, random: Random) -> list[Candidate]:
        """At most `count` different candidates, at most `per_peer` of one origin; fewer if there are no more."""
        ...


class Uniform:
    """The paper's rule (arXiv 2509.08721, section 4): uniform over groups with non-zero variance, none twice."""

    def choose(self, candidates: Sequence[Candidate], count: int, per_peer: int, random: Random) -> list[Candidate]:
        """See `Selection`. In random order, one whose origin has its share already is passed over."""
        chosen: list[Candidate] = []
        taken: Counter[str] = Counter()
        for candidate in random.sample(list(candidates), len(candidates)):
            if len(chosen) == count:
                break
            if taken[candidate.origin] < per_peer:
                chosen.append(candidate)
                taken[candidate.origin] += 1
        return chosen
