"""Which external groups enter a round, and what of them: strategies that choose among the candidates of the pool."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, Protocol

from rl.rollouts import Completion, ScoredGroup

Strategy = Literal["uniform", "fill", "positives", "fill_positives"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """An external group that may be trained on, without its texts: those are read for the chosen ones alone.

    `id` is its key in the pool, `round` the round of this node in which it came, `reward` the mean of its rewards by
    this node's verifiers, `uses` how many rounds have trained on it. All candidates are informative. `trust` is the
    share of its origin's groups that passed the likelihood gate, of those that were tried lately.
    """

    id: int
    origin: str
    round: int
    kind: str
    completions: int
    reward: float
    uses: int
    trust: float = 1.0

    @property
    def successes(self) -> int:
        """What its rewards add up to, rounded up: with rewards of 0 and 1 the number of rewarded completions."""
        return _successes(self.reward, self.completions)


@dataclass(frozen=True, slots=True)
class Room:
    """What round `number` has room for: `external` (J) places, at most `per_peer` of them for one origin.

    A place is a group, or `group_size` (L) completions where a strategy takes single ones. Of the round's `local` (I)
    own groups `informative` have rewards that differ. An origin of which much was refused has less room, but always
    that for one group: it may have become honest, or this node's policy wider.
    """

    number: int
    local: int
    informative: int
    external: int
    per_peer: int
    group_size: int


class Selection(Protocol):
    """A strategy. The same candidates and the same state of `random` give the same choice."""

    def choose(self, candidates: Sequence[Candidate], room: Room, random: Random) -> list[Candidate]:
        """Different candidates, as many as there is room for; fewer if there are no more."""
        ...

    def part(self, group: ScoredGroup, most: int) -> ScoredGroup:
        """What of a chosen group is trained on. Its advantages are those of the whole group.

        A strategy that takes single completions takes at most `most` (L) of one group.
        """
        ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """The paper's rule (arXiv 2509.08721, section 4): J groups, uniform over those that differ in reward, none twice.

    With a `half_life` a candidate that came so many rounds ago is half as likely to be drawn next as one of now; 0
    makes them all alike.
    """

    half_life: float = 0.0

    def choose(self, candidates: Sequence[Candidate], room: Room, random: Random) -> list[Candidate]:
        """See `Selection`. In random order, one whose origin has its share already is passed over."""
        return self._groups(candidates, room.external, room, random)

    def part(self, group: ScoredGroup, most: int) -> ScoredGroup:
        """All of it."""
        return group

    def order(self, candidates: Sequence[Candidate], number: int, random: Random) -> list[Candidate]:
        """All candidates as they are to be considered in round `number`: at random, older ones later by `half_life`."""
        if self.half_life == 0:
            return random.sample(list(candidates), len(candidates))
        # Weighted sampling without replacement: the smallest of exponential waiting times (Efraimidis and Spirakis,
        # 2006). Compared by their logarithms, since old groups and a short half-life make the times overflow.
        waiting = [
            (_log_waiting(random) + math.log(2.0) * (number - candidate.round) / self.half_life, place)
            for place, candidate in enumerate(candidates)
        ]
        return [candidates[place] for _, place in sorted(waiting)]

    def _groups(self, candidates: Sequence[Candidate], count: int, room: Room, random: Random) -> list[Candidate]:
        chosen: list[Candidate] = []
        taken: Counter[str] = Counter()
        for candidate in self.order(candidates, room.number, random):
            if len(chosen) == count:
                break
            if taken[candidate.origin] < math.ceil(room.per_peer * candidate.trust):
                chosen.append(candidate)
                taken[candidate.origin] += 1
        return chosen


@dataclass(frozen=True, slots=True)
class Fill(Uniform):
    """As many groups as make I + J informative ones of the round: own groups that teach nothing leave their places."""

    def choose(self, candidates: Sequence[Candidate], room: Room, random: Random) -> list[Candidate]:
        """See `Selection`."""
        return self._groups(candidates, room.local + room.external - room.informative, room, random)


@dataclass(frozen=True, slots=True)
class Positives(Uniform):
    """What others got right, and none of what they got wrong: up to J x L rewarded completions, from many groups.

    The failures of another policy are often none that this one would make, and pushing their probability down moves
    this policy in directions that nobody has measured.
    """

    def choose(self, candidates: Sequence[Candidate], room: Room, random: Random) -> list[Candidate]:
        """See `Selection`. What does not fit any more is passed over for what does."""
        left = room.external * room.group_size
        chosen: list[Candidate] = []
        taken: Counter[str] = Counter()
        for candidate in self.order(candidates, room.number, random):
            count, before = min(candidate.successes, room.group_size), taken[candidate.origin]
            share = math.ceil(room.per_peer * room.group_size * candidate.trust)
            if count <= left and (before == 0 or before + count <= share):
                chosen.append(candidate)
                left -= count
                taken[candidate.origin] += count
        return chosen

    def part(self, group: ScoredGroup, most: int) -> ScoredGroup:
        """Its distinct completions of positive advantage."""
        return positives(group, most)


@dataclass(frozen=True, slots=True)
class FillPositives(Fill):
    """The groups of `Fill`, of each its distinct completions of positive advantage."""

    def part(self, group: ScoredGroup, most: int) -> ScoredGroup:
        """Its distinct completions of positive advantage."""
        return positives(group, most)


STRATEGIES: dict[Strategy, type[Uniform]] = {
    "uniform": Uniform,
    "fill": Fill,
    "positives": Positives,
    "fill_positives": FillPositives,
}


def positives(group: ScoredGroup, most: int) -> ScoredGroup:
    """The distinct completions of positive advantage, each once, the best first, and at most `most`.

    At most as many as its rewards add up to, too: a group of many answers that are hardly better than nothing is not a
    way to fill a round. Nor is one right answer among 64 a way to weigh more than the rarest in a group of `most`,
    whose advantage is sqrt(most - 1).
    """
    rarest = math.sqrt(most - 1)
    best: dict[Completion, tuple[float, float]] = {}
    for completion, reward, advantage in zip(group.group.completions, group.rewards, group.advantages, strict=True):
        if advantage > 0:
            best.setdefault(replace(completion, tokens=None, logprobs=None), (reward, min(advantage, rarest)))
    count = min(most, _successes(group.mean_reward, len(group.rewards)))
    kept = sorted(best.items(), key=lambda item: -item[1][0])[:count]
    return replace(
        group,
        group=replace(group.group, completions=tuple(completion for completion, _ in kept)),
        rewards=tuple(reward for _, (reward, _) in kept),
        advantages=tuple(advantage for _, (_, advantage) in kept),
    )


def _log_waiting(random: Random) -> float:
    return math.log(-math.log1p(-(random.random() or 2.0**-54)))


def _successes(mean_reward: float, completions: int) -> int:
    # A mean is a sum divided, and comes back a hair above it.
    return max(1, math.ceil(mean_reward * completions - 1e-6))
