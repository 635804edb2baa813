"""The links of nodes, as published: what they carry, and how long a byte takes to the other side.

- Home: 100 Mbit/s down and 20 up, what the FCC calls broadband since its report of March 2024.
- Data centre: 1 Gbit/s both ways.
- Round trips: median 159 ms, at most 800 ms, as measured between 1740 Internet name servers with the King method (Dabek
  et al., Vivaldi, SIGCOMM 2004). Drawn for each pair of nodes, from a log-normal distribution with that median and a
  sigma of 0.5, whose mean is 180 ms.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

HOME_UP, HOME_DOWN, CENTRE = 20e6 / 8, 100e6 / 8, 1e9 / 8
"""Bytes a second."""

_MEDIAN_TRIP, _SIGMA, _LONGEST_TRIP = 0.159, 0.5, 0.8
_TABLE = 1 << 20


@dataclass(frozen=True)
class Links:
    """`up` and `down` of each node in bytes a second, and one-way seconds between two nodes, the same both ways."""

    up: Floats
    down: Floats
    one_way: Floats

    def between(self, one: Ints, other: Ints) -> Floats:
        """Seconds that a byte takes from one to the other. A pair has the same whenever it is asked for."""
        low, high = np.minimum(one, other), np.maximum(one, other)
        found: Floats = self.one_way[(low * 1_000_003 + high * 7919) % len(self.one_way)]
        return found


def draw(nodes: int, home: float, rng: np.random.Generator) -> Links:
    """Links of so many nodes, of which the share `home` is on home connections."""
    at_home = rng.random(nodes) < home
    trips = np.minimum(rng.lognormal(np.log(_MEDIAN_TRIP), _SIGMA, _TABLE), _LONGEST_TRIP)
    return Links(np.where(at_home, HOME_UP, CENTRE), np.where(at_home, HOME_DOWN, CENTRE), trips / 2)


def uniform(nodes: int, rate: float, seconds: float) -> Links:
    """Links that are all alike: `rate` bytes a second both ways."""
    return Links(np.full(nodes, rate), np.full(nodes, rate), np.full(1, seconds))
