"""Strategies that were tried and are not in the product: see docs/LOG.md for what became of them."""

from collections.abc import Sequence
from itertools import chain, zip_longest
from random import Random

from rl.selection import STRATEGIES, Candidate, Positives, Uniform


class RareFirst(Positives):
    """The groups with the fewest right answers first: what is rare is what is left to learn."""

    def order(self, candidates: Sequence[Candidate], number: int, random: Random) -> list[Candidate]:
        """By success, those alike at random."""
        return sorted(super().order(candidates, number, random), key=lambda candidate: candidate.reward)


class Balanced(Positives):
    """One group of each kind in turn, so that kinds that few are good at are not crowded out."""

    def order(self, candidates: Sequence[Candidate], number: int, random: Random) -> list[Candidate]:
        """Kind by kind, at random within each."""
        kinds: dict[str, list[Candidate]] = {}
        for candidate in super().order(candidates, number, random):
            kinds.setdefault(candidate.kind, []).append(candidate)
        turns = chain.from_iterable(zip_longest(*kinds.values()))
        return [candidate for candidate in turns if candidate is not None]


ALL: dict[str, type[Uniform]] = {
    **{str(name): strategy for name, strategy in STRATEGIES.items()},
    "rare_first": RareFirst,
    "balanced": Balanced,
}
