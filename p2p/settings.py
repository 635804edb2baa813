"""The settings of the network. `node.config` puts them into the tree of the whole node."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

SwarmName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
"""Part of a gossip topic, so it is short and plain."""

DEFAULT_PORT = 4747


class NetworkSettings(BaseModel):
    """[network]: how this node finds others and whom it listens to. Nothing of it is used with `--silo`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    swarm: SwarmName = "main"
    """Name of the swarm. Nodes with different names share nothing."""

    listen: list[str] = [f"/ip4/0.0.0.0/tcp/{DEFAULT_PORT}"]
    """Multiaddrs to listen on. If the port of the default is taken, a free one is used, and said."""

    announce: list[str] = []
    """Multiaddrs under which others reach this node, where it cannot know them itself (a forwarded port, a name)."""

    join: list[str] = []
    """Multiaddrs of nodes to begin with, as `swarmnode id` prints them. One that does not answer is tried again and
    again; none at all is no error."""

    mdns: bool = True
    """Find nodes on the local network."""

    dht: bool = True
    """Find nodes through the Kademlia DHT of the nodes that are already known."""

    upnp: bool = True
    """Ask the router to forward the port."""

    relay: list[str] = []
    """Multiaddrs of circuit relays through which others may reach this node, if it stands behind a NAT."""

    serve_relay: bool = False
    """Relay connections for others: for a node with a public address."""

    max_peers: int = Field(default=64, ge=1, le=4096)
    """Connections at most. A quarter of them is kept for those that this node itself makes."""

    allow: list[str] = []
    """Peer ids of a private swarm. Not empty: no other node may connect, and rollouts of no other are taken."""

    shards: int = Field(default=1, ge=1, le=1024)
    """Gossip topics that the swarm's nodes are spread over, by peer id. The same on all of its nodes: about one for a
    hundred of them."""

    subscribe: int = Field(default=1, ge=1, le=64)
    """Shards that this node listens to, its own among them: what it receives stays flat as the swarm grows."""

    wait_for_peers: int = Field(default=0, ge=0, le=4096)
    """Hold the first round until so many other nodes are connected and ready for theirs, or `wait_seconds` are over."""

    wait_seconds: float = Field(default=60.0, ge=0, le=86400)
    """See `wait_for_peers`."""


class AdmissionSettings(BaseModel):
    """[admission]: what is taken from one other node. Rollouts are always checked by making and scoring the task."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    batches_per_second: float = Field(default=20.0, gt=0, le=1e4)
    """Batches a second that one node may send, over a longer time; more are refused."""

    burst: int = Field(default=100, ge=1, le=10**5)
    """Batches that one node may send at once."""

    queue: int = Field(default=64, ge=1, le=10**4)
    """Batches of one node that wait for their check; more are left to the catch-up."""

    seconds_per_second: float = Field(default=0.5, gt=0, le=64)
    """Sandbox time that one node's rollouts may take of each second, over a longer time."""

    max_completion: int = Field(default=2**15, ge=1, le=2**18)
    """Characters in a completion that is taken."""

    max_age_seconds: float = Field(default=24 * 3600.0, gt=0, le=10**8)
    """Batches older than this, by their own date, are refused. Generous, since clocks differ."""
