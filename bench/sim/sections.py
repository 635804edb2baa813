"""What is run for each table: names of rows, and the runs that each row is the mean of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.sim.jobs import Job
from bench.sim.plan import Plan
from bench.sim.regimes import CONFIGURATIONS, REGIMES

SHORT, LONG = 100, 500
"""Rounds."""

PRETRAINED = (1, 2, 3)
"""Seeds of the first policies."""

TUNING, TUNING_PRETRAINED = (101, 102), 9
"""Seeds of the runs that learning rates were chosen by: none of them is in any other table."""

GRID = (2e-4, 4e-4, 8e-4)
"""Learning rates that are tried."""

RATES = {"4/0 + 4 own replayed": 2e-4, "8/0 refilled": 8e-4}
"""The learning rate of the grid that gave each configuration most on the tuning seeds (`bench.swarm tune tune-long`).
At twice this rate the default has more reward in 100 rounds and as much in the end, but less variety. After how many
steps it falls (`Plan.decay_after`) was chosen likewise: 50 for what trains alone or by the paper's rule."""

PLAIN_RATE = 4e-4
"""That of all others, for 100 rounds as for 500."""

CONSTANT_RATE = 2e-4
"""The best for 500 rounds where it does not fall."""


@dataclass(frozen=True)
class Section:
    """A table. Ratios are to the row `control`; `curves` are the rows whose rewards are drawn."""

    title: str
    rows: Mapping[str, Sequence[Job]]
    control: str = "8/0"
    curves: tuple[str, ...] = ()


def tuned(name: str, rounds: int, **changes: Any) -> Plan:
    """A configuration at its learning rate."""
    return replace(CONFIGURATIONS[name], **{"lr": RATES.get(name, PLAIN_RATE), "rounds": rounds, **changes})


def runs(name: str, seeds: int, regime: str = "specialists", rounds: int = SHORT, **changes: Any) -> list[Job]:
    """`seeds` runs of a configuration, with held-out accuracy at the end.

    Of specialists the seeds of the first policies take turns; in other regimes there is one, since each takes minutes.
    """
    first = PRETRAINED if regime == "specialists" else PRETRAINED[:1]
    return [
        Job(
            regime,
            first[seed % len(first)],
            REGIMES[regime].plan(tuned(name, rounds, seed=seed, **changes)),
            held_out_every=rounds,
        )
        for seed in range(seeds)
    ]


def headline(seeds: int, others: int) -> Section:
    """The paper's experiment on specialised nodes, its controls, and this product's default."""
    rows = {name: runs(name, seeds if name in MAIN else others) for name in CONFIGURATIONS}
    rows["default, J = 4"] = runs("default", others, external=4)
    return Section(f"Specialists, {SHORT} rounds", rows, curves=MAIN)


MAIN = ("8/0", "4/4", "default")

_UNTUNED = " (learning rates tuned on specialists)"


def regimes(seeds: int) -> list[Section]:
    """The same three configurations from other first policies, at the rates tuned on specialists."""
    return [
        Section(f"{regime.name}: {regime.what}{_UNTUNED}", {name: runs(name, seeds, regime.name) for name in MAIN})
        for regime in REGIMES.values()
        if regime.name not in ("specialists", "smoke")
    ]


def long_run(seeds: int) -> Section:
    """Five times as many rounds, at learning rates tuned for that, which fall as the product's do or stay."""
    rows = {name: runs(name, seeds, rounds=LONG) for name in MAIN}
    for name in ("8/0", "default"):
        rows[f"{name}, rate stays"] = runs(name, seeds, rounds=LONG, lr=CONSTANT_RATE, decay_after=0)
    return Section(f"Specialists, {LONG} rounds", rows, curves=MAIN)


def strategies(seeds: int) -> Section:
    """One change to the default each."""
    changes: dict[str, dict[str, Any]] = {
        "default": {},
        "default, no gate": {"gate": False},
        "default, uniform": {"selection": "uniform"},
        "default, fill": {"selection": "fill"},
        "default, fill_positives": {"selection": "fill_positives"},
        "default, J = 4": {"external": 4},
        "default, J = 16": {"external": 16},
        "default, J = 16, 4 of a peer": {"external": 16, "per_peer": 4},
        "default, half-life 3": {"half_life": 3.0},
        "default, each once": {"reuse": 1},
        "default, reuse 10": {"reuse": 10},
        "default, rare first": {"selection": "rare_first"},
        "default, balanced": {"selection": "balanced"},
        "default, temperature 1.2": {"temperature": 1.2},
        "default, two epochs": {"epochs": 2},
        "default, I = 2": {"local": 2},
        "default, I = 8": {"local": 8},
    }
    rows = {name: runs("default", seeds, **c) for name, c in changes.items()}
    rows["8/0, two epochs"] = runs("8/0", seeds, epochs=2)
    return Section("The default, changed", rows, "default")


def asynchrony(seeds: int) -> list[Section]:
    """Groups that come late or never, nodes that are slow or start over."""
    troubles: dict[str, dict[str, Any]] = {
        "none": {},
        "5 rounds late": {"delay": 5},
        "20 rounds late": {"delay": 20},
        "50 rounds late": {"delay": 50},
        "0 to 50 rounds late": {"delay_up_to": 50},
        "30 % lost": {"loss": 0.3},
        "half at a third of the speed": {"speeds": (1, 3)},
        "one starts over every 10 rounds": {"reset_every": 10},
    }
    return [
        Section(f"{what}{_UNTUNED}", {name: runs(name, seeds, **_felt(name, trouble)) for name in MAIN})
        for what, trouble in troubles.items()
    ]


def _felt(name: str, trouble: dict[str, Any]) -> dict[str, Any]:
    """What of a trouble changes anything: to a node that learns alone it is the same what the network does."""
    return {} if not CONFIGURATIONS[name].external and trouble.keys() & {"delay", "delay_up_to", "loss"} else trouble


def sizes(seeds: int) -> list[Section]:
    """Swarms of other sizes."""
    return [
        Section(
            f"{nodes} nodes",
            {name: [replace(job, nodes=nodes) for job in runs(name, seeds)] for name in MAIN},
        )
        for nodes in (2, 4, 16)
    ]


def tuning(names: Sequence[str], rounds: int) -> Section:
    """Each configuration at each learning rate of the grid, on seeds that are used for nothing else."""
    rows = {
        f"{name} at {lr:g}": [
            Job("specialists", TUNING_PRETRAINED, replace(tuned(name, rounds, seed=seed), lr=lr), held_out_every=rounds)
            for seed in (TUNING if rounds == SHORT else TUNING[:1])
        ]
        for name in names
        for lr in GRID
    }
    return Section(f"Learning rates, {rounds} rounds", rows, control=next(iter(rows)))


def smoke() -> Section:
    """One seed of the headline's main rows, from policies that are made in a minute."""
    what = REGIMES["smoke"].what
    return Section(f"One seed, {SHORT} rounds: {what}", {name: runs(name, 1, "smoke") for name in MAIN}, curves=MAIN)
