"""Policies that nodes start from, and the configurations that are compared."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.sim.pretrain import cached, pretrain, specialise
from bench.sim.stack import Shape, StackedPolicy
from bench.sim.tasks import Codec, Kind, Lessons
from bench.sim.world import Plan
from bench.tiny_tasks import FORMS
from node.config import SharingSettings
from rl.settings import TrainingSettings

CONTEXT = 64
"""Longest sequence of a policy: a prompt of sixteen tokens, a completion of eight, and room for what others send."""

BASE_STEPS, BASE_BATCH, BASE_LR = 500, 256, 3e-3
OWN_STEPS, OWN_BATCH, OWN_LR = 60, 128, 1e-3

SHARES = {"calendar_arithmetic": 2.0, "spell_backward": 2.0, "decimal_arithmetic": 2.0}
"""How often kinds that are learned more slowly are taught, against 1 for the others."""


@dataclass(frozen=True)
class Regime:
    """How often the nodes' first policies give the accepted lead-in.

    `everywhere` is its probability in what all are taught. In a few more supervised steps node n is then taught its own
    kind (number n) half of the time, with the accepted lead-in as often as `own`, and the other kinds as before; 0 leaves
    that out. `widths` are the models' sizes, as many nodes of each; `group_sizes` repeat over the nodes.
    """

    name: str
    what: str
    everywhere: float
    own: float = 0.0
    widths: tuple[int, ...] = (64,)
    group_sizes: tuple[int, ...] = (8,)
    own_task: bool = False

    def plan(self, plan: Plan) -> Plan:
        """A plan as it is run in this regime."""
        return replace(plan, group_sizes=self.group_sizes, own_task=self.own_task)


REGIMES = {
    regime.name: regime
    for regime in (
        Regime("specialists", "each node is good at its own kind, and hardly ever right elsewhere", 0.015, 0.4),
        Regime("identical", "all nodes start from one policy, right one time in twenty", 1 / FORMS),
        Regime("sparse", "all nodes start from one policy, right one time in a hundred", 0.015),
        Regime("strong specialists", "as specialists, and all but never right elsewhere", 0.004, 0.6),
        Regime("own tasks", "specialists that only ever meet their own kind", 0.015, 0.4, own_task=True),
        Regime("mixed", "specialists of two sizes, with groups of 4, 8 and 16", 0.015, 0.4, (64, 96), (4, 8, 16)),
    )
}


def policies(
    regime: Regime, seed: int, kinds: Sequence[Kind], codec: Codec, directory: Path, nodes: int = 8
) -> list[StackedPolicy]:
    """The first policies of a swarm, a stack for each size of model; made once and kept in `directory`."""
    stacks = []
    each = nodes // len(regime.widths)
    for number, width in enumerate(regime.widths):
        count = each if number else nodes - each * (len(regime.widths) - 1)
        first = number * (nodes - each)
        stacks.append(_stack(regime, seed, kinds, codec, width, range(first, first + count), directory))
    return stacks


def _stack(
    regime: Regime,
    seed: int,
    kinds: Sequence[Kind],
    codec: Codec,
    width: int,
    numbers: range,
    directory: Path,
) -> StackedPolicy:
    shape = Shape(vocabulary=len(codec.tokenizer), context=CONTEXT, width=width, heads=width // 16)
    shares = [SHARES.get(kind.name, 1.0) for kind in kinds]
    accepted = [regime.everywhere] * len(kinds)

    def base() -> StackedPolicy:
        lessons = Lessons(kinds, codec, shares, accepted)
        return pretrain(shape, lessons, steps=BASE_STEPS, batch=BASE_BATCH, lr=BASE_LR, seed=seed)

    def own() -> StackedPolicy:
        lessons = [
            Lessons(
                kinds,
                codec,
                [len(kinds) - 1.0 if kind == node % len(kinds) else 1.0 for kind in range(len(kinds))],
                [regime.own if kind == node % len(kinds) else regime.everywhere for kind in range(len(kinds))],
            )
            for node in numbers
        ]
        stack = cached(f"base {regime.everywhere:.4g} {width} {seed}", base, directory).replicate(len(numbers))
        specialise(
            stack, lessons, steps=OWN_STEPS, batch=OWN_BATCH, lr=OWN_LR, seeds=[1000 * seed + n for n in numbers]
        )
        return stack

    if regime.own:
        key = f"own {regime.everywhere:.4g} {regime.own:.4g} {width} {seed} {numbers.start}-{numbers.stop}"
        return cached(key, own, directory)
    return cached(f"base {regime.everywhere:.4g} {width} {seed}", base, directory).replicate(len(numbers))


def default_plan(**changes: Any) -> Plan:
    """The product's own defaults, read from its configuration."""
    sharing, training = SharingSettings(), TrainingSettings()
    plan = Plan(
        local=sharing.local,
        external=sharing.external,
        selection=sharing.selection,
        half_life=sharing.half_life,
        per_peer=sharing.per_peer,
        max_age=sharing.max_age,
        reuse=sharing.reuse,
        epochs=training.epochs,
        gate=training.gate,
    )
    return replace(plan, **changes)


def uniform(local: int, external: int, **changes: Any) -> Plan:
    """The paper's rule: uniform over informative groups, whoever sent them, and no gate."""
    plan = Plan(local=local, external=external, selection="uniform", per_peer=max(1, external), gate=False)
    return replace(plan, **changes)


CONFIGURATIONS: dict[str, Plan] = {
    "8/0": uniform(8, 0),
    "6/2": uniform(6, 2),
    "4/4": uniform(4, 4),
    "2/6": uniform(2, 6),
    "4/0": uniform(4, 0),
    "4/0 + 4 own replayed": uniform(4, 4, replay=True),
    "8/0 refilled": uniform(32, 0, informative=8),
    "fill": uniform(4, 4, selection="fill"),
    "fill + positives": uniform(4, 4, selection="fill_positives"),
    "default": default_plan(),
}
