"""Policies that nodes start from, and the configurations that are compared."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.sim.plan import Plan
from bench.sim.pretrain import cached, pretrain, specialise
from bench.sim.stack import Shape, StackedPolicy
from bench.sim.tasks import Codec, Kind, Lessons
from bench.tiny_tasks import FORMS
from node.config import SharingSettings
from rl.settings import TrainingSettings

CONTEXT = 64
"""Longest sequence of a policy: a prompt of sixteen tokens, a completion of eight, and room for what others send."""

BASE_STEPS, BASE_BATCH, BASE_LR = 1500, 256, 3e-3
OWN_STEPS, OWN_BATCH, OWN_LR = 60, 128, 5e-4

SHARES = {"calendar_arithmetic": 3.0, "spell_backward": 2.0, "decimal_arithmetic": 2.0}
"""How often kinds that are learned more slowly are taught, against 1 for the others."""


@dataclass(frozen=True)
class Regime:
    """How often the nodes' first policies give the accepted lead-in.

    All are taught the accepted one with probability `everywhere`. If there is an `own`, a few more steps follow, a
    third of which are node n's own kind (number n), with the accepted lead-in as often as that. `widths` are the
    models' sizes, as many nodes of each; `group_sizes` repeat over the nodes.
    """

    name: str
    what: str
    everywhere: float
    own: float = 0.0
    widths: tuple[int, ...] = (64,)
    group_sizes: tuple[int, ...] = (8,)
    own_task: bool = False
    steps: int = BASE_STEPS

    def plan(self, plan: Plan) -> Plan:
        """A plan as it is run in this regime."""
        return replace(plan, group_sizes=self.group_sizes, own_task=self.own_task)


REGIMES = {
    regime.name: regime
    for regime in (
        Regime("specialists", "each node is good at its own kind, and hardly ever right elsewhere", 0.01, 0.4),
        Regime("identical", "all nodes start from one policy, right one time in twenty", 1 / FORMS),
        Regime("sparse", "all nodes start from one policy, right one time in a hundred", 0.01),
        Regime("strong specialists", "as specialists, and all but never right elsewhere", 0.004, 0.6),
        Regime("own tasks", "specialists that only ever meet their own kind", 0.01, 0.4, own_task=True),
        Regime("smoke", "specialists that have been taught for a third as long", 0.01, 0.4, steps=BASE_STEPS // 3),
        Regime("mixed", "specialists of two sizes, with groups of 4, 8 and 16", 0.01, 0.4, (64, 96), (4, 8, 16)),
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
    regime: Regime, seed: int, kinds: Sequence[Kind], codec: Codec, width: int, numbers: range, directory: Path
) -> StackedPolicy:
    shape = Shape(vocabulary=len(codec.tokenizer), context=CONTEXT, width=width, heads=width // 16)

    def base() -> StackedPolicy:
        shares = [SHARES.get(kind.name, 1.0) for kind in kinds]
        lessons = Lessons(kinds, codec, shares, [regime.everywhere] * len(kinds))
        return pretrain(shape, lessons, steps=regime.steps, batch=BASE_BATCH, lr=BASE_LR, seed=seed)

    def own() -> StackedPolicy:
        stack = all_alike()
        lessons = [_own_lessons(regime, node, kinds, codec) for node in numbers]
        seeds = [1000 * seed + node for node in numbers]
        specialise(stack, lessons, steps=OWN_STEPS, batch=OWN_BATCH, lr=OWN_LR, seeds=seeds)
        return stack

    def all_alike() -> StackedPolicy:
        return cached(f"base {regime.steps} {regime.everywhere:.4g} {width} {seed}", base, directory).replicate(
            len(numbers)
        )

    if not regime.own:
        return all_alike()
    which = f"{numbers.start}-{numbers.stop}"
    return cached(f"own {regime.steps} {regime.everywhere:.4g} {regime.own:.4g} {width} {seed} {which}", own, directory)


def _own_lessons(regime: Regime, node: int, kinds: Sequence[Kind], codec: Codec) -> Lessons:
    """What node `node` is taught last: a third of it its own kind."""
    own = node % len(kinds)
    shares = [len(kinds) / 2 if kind == own else 1.0 for kind in range(len(kinds))]
    accepted = [regime.own if kind == own else regime.everywhere for kind in range(len(kinds))]
    return Lessons(kinds, codec, shares, accepted)


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
        decay_after=training.decay_after,
        epochs=training.epochs,
        gate=training.gate,
    )
    return replace(plan, **changes)


def uniform(local: int, external: int, **changes: Any) -> Plan:
    """The paper's rule: uniform over informative groups, whoever sent them, and no gate."""
    plan = Plan(local, external, selection="uniform", per_peer=max(1, external), gate=False, decay_after=50)
    return replace(plan, **changes)


def own_positives(local: int) -> Plan:
    """The product's rule, with what a node got right itself a round before in the places of what others did."""
    return default_plan(local=local, replay=True, delay=1, per_peer=SharingSettings().external)


CONFIGURATIONS: dict[str, Plan] = {
    "8/0": uniform(8, 0),
    "6/2": uniform(6, 2),
    "4/4": uniform(4, 4),
    "2/6": uniform(2, 6),
    "4/0": uniform(4, 0),
    "4/0 + 4 own replayed": uniform(4, 4, replay=True, delay=1, reuse=20),
    "4/0 + own positives": own_positives(4),
    "8/0 + own positives": own_positives(8),
    "8/0 refilled": uniform(32, 0, informative=8),
    "fill": uniform(4, 4, selection="fill"),
    "fill + positives": uniform(4, 4, selection="fill_positives"),
    "default": default_plan(),
}
