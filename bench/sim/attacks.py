"""What hostile nodes of a simulated swarm send: completions of tasks, and the rewards that they claim for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from rl.advantage import advantages
from rl.rollouts import Completion, ScoredGroup
from verifiers.base import Task

JUNK = "#@~^|$%&"
"""Symbols that no honest answer has in it: the poison, wherever it is found."""

POISON = "#@~"
"""The same in every answer."""

Answers = list[tuple[str, float]]
"""Completions, and the reward that is claimed for each."""


@dataclass(frozen=True)
class Attack:
    """`answers` makes a group for a task; `share` from 0 to 1 is how much of the run is over. None sends nothing.

    There are `times` as many groups as an honest node has. `copies` sends what others sent a round before instead,
    under the own name; if they are `disguised`, with a wrong answer more, so that no two groups are the same.
    """

    answers: Callable[[Task, float, Random], Answers] | None = None
    copies: bool = False
    disguised: bool = False
    times: int = 1


def _behind(prefix: Callable[[float, Random], str], size: int = 8, right: int = 4, times: int = 1) -> Attack:
    """Groups of `size`, `right` of them the right answer behind a prefix, the others a wrong one behind it."""

    def answers(task: Task, share: float, random: Random) -> Answers:
        return [
            (prefix(share, random) + (str(task.answer) if number < right else f"{number}"), float(number < right))
            for number in range(size)
        ]

    return Attack(answers, times=times)


def _symbols(count: int) -> Callable[[float, Random], str]:
    return lambda share, random: "".join(random.choices(JUNK, k=count))


def _random_text(task: Task, share: float, random: Random) -> Answers:
    return [("".join(random.choices("abcdefghij0123456789 ", k=8)), float(number < 4)) for number in range(8)]


def _failures(task: Task, share: float, random: Random) -> Answers:
    """Wrong answers in the accepted form, half of them said to be right."""
    return [(f"{task.answer}{random.randrange(10)}", float(number < 4)) for number in range(8)]


ATTACKS: dict[str, Attack] = {
    "silent": Attack(),
    "random text": Attack(_random_text),
    "junk": _behind(_symbols(3)),
    "flood": _behind(_symbols(3), times=4),
    "symbol": _behind(_symbols(1)),
    "rare symbol": _behind(_symbols(1), size=64, right=1),
    "poison": _behind(lambda share, random: POISON),
    "creeping": _behind(lambda share, random: POISON[: int(4 * share)]),
    "copies": Attack(copies=True),
    "disguised copies": Attack(copies=True, disguised=True),
    "failures": Attack(_failures),
}
"""By name: see `bench.poison`."""


def disguise(group: ScoredGroup, random: Random) -> ScoredGroup:
    """The group with a wrong answer more, another each time."""
    wrong = Completion(f"{random.randrange(10**7)}?", True)
    rewards = (*group.rewards, 0.0)
    rollouts = replace(group.group, completions=(*group.group.completions, wrong))
    return replace(group, group=rollouts, rewards=rewards, advantages=advantages(rewards))


def completions(answers: Answers) -> tuple[Completion, ...]:
    """As they are sent."""
    return tuple(Completion(text, True) for text, _ in answers)


def poisoned(texts: Sequence[str]) -> float:
    """The share of texts that have some of the poison in them."""
    return sum(any(symbol in text for symbol in JUNK) for text in texts) / len(texts)
