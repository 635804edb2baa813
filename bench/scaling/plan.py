"""What a simulated swarm is like, and what was seen of it."""

from dataclasses import dataclass

PER_SHARD = 100
"""Nodes of a shard, by the rule of docs/operations.md."""

HEARD = 2
"""Shards that a node hears, by the same rule, once there are several."""


def shards_for(nodes: int) -> int:
    """How many shards a swarm of so many nodes should have."""
    return max(1, min(1024, round(nodes / PER_SHARD)))


@dataclass(frozen=True)
class Plan:
    """One swarm.

    `looking` is whether nodes look for others by shard: without it they hold some connections with whomever they meet.
    In `seconds`, `churn` of the nodes leave, half of them without a word, and as many others join. Of the nodes
    `riders` take and never give: they publish nothing, pass nothing on and offer nothing. Every node that gives makes a
    batch a round. `messages` are followed on each topic.
    """

    nodes: int
    shards: int
    subscribe: int
    looking: bool = True
    churn: float = 0.0
    riders: float = 0.0
    seconds: float = 600.0
    round_seconds: float = 30.0
    messages: int = 24
    home: float = 0.8
    """Share of nodes on a home connection; the others are in data centres."""
    seed: int = 1


def recommended(nodes: int) -> Plan:
    """A swarm with as many shards as the rule says."""
    shards = shards_for(nodes)
    return Plan(nodes, shards, min(HEARD, shards))


@dataclass(frozen=True)
class Spread:
    """Mean and 99th percentile over nodes."""

    mean: float
    p99: float


@dataclass(frozen=True)
class Outcome:
    """What was seen. Bytes are a second and a node; seconds are from publishing.

    `copies` is how often a batch comes to a node that gets it. `delivered` is the share of (batch, subscriber) pairs
    that gossip alone serves, `worst` that of the node in the worst hundredth. `swarm_seen` is the share of all that the
    swarm publishes which a node gets. `half` is when half of a topic's subscribers have a batch (the mean over batches,
    and the 99th percentile), `pooled` the mean with what admission takes until its groups are in the pool. `full` is
    the share of nodes whose link is asked for more than it has. `catch_up` is in `bytes_in` and `bytes_out` already.
    """

    bytes_in: Spread
    bytes_out: Spread
    control: float
    catch_up: float
    batches: float
    copies: float
    mesh: float
    connections: Spread
    delivered: float
    worst: float
    swarm_seen: float
    half: Spread
    pooled: float
    last: float
    load: float
    full: float
    followed: int
    seconds: float
