"""Real nodes of the network layer in one process, whose connections have the delays and limits of simulated links.

Each connection goes through a relay on loopback that holds back every byte as `bench.scaling.links` says, and counts
it. So what the simulation says of the same meshes on the same links can be held against what these nodes do.
"""

import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.scaling.costs import GROUPS, Costs, Writer
from bench.scaling.exact import spread_exactly
from bench.scaling.graph import Graph, build
from bench.scaling.links import Floats, Ints, Links, draw
from bench.scaling.plan import Plan
from bench.scaling.spread import Cost, spread
from bench.scaling.world import FRAMING, chatter
from p2p.discovery import TARGET
from p2p.gossip import topic_of
from p2p.host import HostSettings, open_host
from p2p.host.host import Host
from p2p.settings import AdmissionSettings, NetworkSettings
from p2p.swarm import Swarm, open_swarm
from rl.rollouts import RolloutGroup, ScoredGroup
from verifiers.base import Task, TaskRef, is_held_out

_SWARM = "scale"
_CHUNK = 65536
_SETTLE, _GRACE = 4.0, 5.0
_PREFIX = 8  # bytes around a message in its frame: two tags and two lengths of three bytes


@dataclass(frozen=True)
class Seen:
    """What became of the batches of a run: means; bytes a second and a node, seconds from publishing.

    `size` is that of a batch as it travels between two nodes. `cpu` are seconds of processor time a copy, with
    sending it, getting it, and relaying it here.
    """

    nodes: int
    batches: int
    delivered: float
    copies: float
    bytes_in: float
    bytes_out: float
    half: float
    last: float
    size: float
    cpu: float
    seconds: float


class Tasks:
    """Makes what it is asked for and finds one answer right, at once: what admission takes is not looked at here."""

    async def make(self, ref: TaskRef) -> Task:
        """See `p2p.verification.Tasks`."""
        await trio.lowlevel.checkpoint()
        return task(ref.index)

    async def score(self, of: Task, completions: Sequence[str]) -> list[float]:
        """See `p2p.verification.Tasks`."""
        await trio.lowlevel.checkpoint()
        return [0.0] * (len(completions) - 1) + [1.0]


def task(index: int) -> Task:
    """One of many tasks."""
    return Task(TaskRef("bench", "1", "{}", 1, index), "bench", f"question {index}", str(index))


class Pool:
    """Notes when each group comes."""

    def __init__(self) -> None:
        self.came: dict[int, float] = {}

    async def add(self, groups: Sequence[ScoredGroup]) -> None:
        """See `p2p.admission.Pool`."""
        for group in groups:
            self.came.setdefault(group.group.task.ref.index, trio.current_time())
        await trio.lowlevel.checkpoint()


class Wires:
    """The links between nodes. A node's uplink sends one thing after the other."""

    def __init__(self, links: Links, nursery: trio.Nursery) -> None:
        self._links = links
        self._nursery = nursery
        self._free: dict[int, float] = defaultdict(float)
        self.sent: Ints = np.zeros(len(links.up), dtype=np.int64)
        self.got: Ints = np.zeros(len(links.up), dtype=np.int64)

    async def lay(self, one: int, other: int, port: int) -> int:
        """A port that leads from node `one` to `port` of node `other`."""
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def serve(stream: trio.SocketStream) -> None:
            async with stream, await trio.open_tcp_stream("127.0.0.1", port) as far, trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, one, other, stream, far)
                await self._pump(other, one, far, stream)
                nursery.cancel_scope.cancel()

        self._nursery.start_soon(trio.serve_listeners, serve, [listener])
        return int(listener.socket.getsockname()[1])

    async def _pump(self, one: int, other: int, source: trio.SocketStream, sink: trio.SocketStream) -> None:
        latency = float(self._links.between(np.array([one]), np.array([other]))[0])
        put, take = trio.open_memory_channel[tuple[float, bytes]](1024)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._release, take, sink)
            try:
                while data := await source.receive_some(_CHUNK):
                    self._free[one] = max(self._free[one], trio.current_time()) + len(data) / self._links.up[one]
                    self.sent[one] += len(data)
                    self.got[other] += len(data)
                    await put.send((self._free[one] + latency, bytes(data)))
            except trio.BrokenResourceError:
                pass  # the connection is over
            nursery.cancel_scope.cancel()

    async def _release(self, take: trio.MemoryReceiveChannel[tuple[float, bytes]], sink: trio.SocketStream) -> None:
        async for when, data in take:
            await trio.sleep_until(when)
            try:
                await sink.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return


class Member:
    """One real node."""

    def __init__(self, swarm: Swarm, pool: Pool) -> None:
        self.swarm = swarm
        self.pool = pool
        self.copies = self.frames = 0
        gossip = self.host._gossip
        receive = gossip.receive

        def counted(link: Any, raw: Any) -> None:
            self.copies += 1
            self.frames += raw.ByteSize() + _PREFIX
            receive(link, raw)

        gossip.receive = counted  # type: ignore[method-assign]  # the one place where every copy comes by

    @property
    def host(self) -> Host:
        """Its libp2p."""
        transport = self.swarm.transport
        assert isinstance(transport, Host)
        return transport

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.host.addresses()[0].split("/")[4])

    @property
    def peer(self) -> str:
        """Its id."""
        return self.host.peer_id


@asynccontextmanager
async def _members(count: int) -> AsyncIterator[list[Member]]:
    settings = NetworkSettings(swarm=_SWARM, mdns=False, dht=False, upnp=False)
    async with AsyncExitStack() as stack:
        members = []
        for number in range(count):
            key, pool = Ed25519PrivateKey.from_private_bytes((number + 1).to_bytes(32, "big")), Pool()
            host = HostSettings(key)
            swarm = await stack.enter_async_context(
                open_swarm(
                    lambda watcher, host=host: open_host(host, watcher),  # type: ignore[misc]
                    key,
                    settings,
                    AdmissionSettings(),
                    Tasks(),
                    pool,
                    round=lambda: 1,
                    model="none",
                    say=lambda level, text: None,
                )
            )
            members.append(Member(swarm, pool))
        yield members


async def _connected(members: Sequence[Member], wires: Wires, rng: random.Random) -> None:
    """Join one after the other, each to as many as the product looks for."""
    for number, member in enumerate(members):
        for other in rng.sample(range(number), min(number, TARGET)):
            port = await wires.lay(number, other, members[other].port)
            await member.host.connect(f"/ip4/127.0.0.1/tcp/{port}/p2p/{members[other].peer}")
    await trio.sleep(_SETTLE)


def meshes(members: Sequence[Member], links: Links) -> Graph:
    """The real meshes and connections, for the simulation."""
    number = {member.peer: place for place, member in enumerate(members)}
    ways: list[tuple[int, int, bool]] = []
    for place, member in enumerate(members):
        mesh = set(member.host.mesh(topic_of(_SWARM, 0)))
        for connection in member.host.connections():
            ways.append((place, number[connection.peer], connection.peer in mesh))
    source, target = (np.array([way[at] for way in ways], dtype=np.int64) for at in (0, 1))
    nodes, everyone = np.arange(len(members)), np.ones(len(members), dtype=np.bool_)
    in_mesh = np.array([way[2] for way in ways], dtype=np.bool_)
    return build(nodes, np.zeros_like(nodes), source, target, in_mesh, links.between, everyone, everyone)


def compare(nodes: int, seconds: float, every: float, costs: Costs, seed: int = 1) -> tuple[Seen, Seen, Seen]:
    """What real nodes did, each of which published a batch `every` so many seconds, and what the simulation says: as it
    is for large swarms, and event by event with one core for all nodes."""
    return trio.run(_compare, nodes, seconds, every, costs, seed)


async def _compare(nodes: int, seconds: float, every: float, costs: Costs, seed: int) -> tuple[Seen, Seen, Seen]:
    rng, links = random.Random(seed), draw(nodes, Plan.home, np.random.default_rng(seed))
    async with trio.open_nursery() as nursery, _members(nodes) as members:
        wires = Wires(links, nursery)
        await _connected(members, wires, rng)
        graph = meshes(members, links)
        real = await _watched(members, wires, seconds, every, rng)
        nursery.cancel_scope.cancel()
    return real, _simulated(graph, links, costs, real, seed), _on_one_core(graph, links, costs, real)


async def _watched(members: Sequence[Member], wires: Wires, seconds: float, every: float, rng: random.Random) -> Seen:
    writer, published = Writer(rng), dict[int, tuple[int, float]]()
    indexes = (index for index in range(10**6) if not is_held_out(task(index).prompt))
    for member in members:
        member.copies = member.frames = 0
    sent, got = wires.sent.copy(), wires.got.copy()
    began, busy = trio.current_time(), time.process_time()

    async def publish(place: int, member: Member) -> None:
        await trio.sleep(rng.uniform(0, every))
        while trio.current_time() < began + seconds:
            groups = [writer.group(task(next(indexes))) for _ in range(GROUPS)]
            scored = [_scored(group, member.peer) for group in groups]
            published[groups[0].task.ref.index] = place, trio.current_time()
            await member.swarm.share(scored, 1)
            await trio.sleep(every)

    async with trio.open_nursery() as nursery:
        for place, member in enumerate(members):
            nursery.start_soon(publish, place, member)
    await trio.sleep(_GRACE)
    lasted, busy = trio.current_time() - began, time.process_time() - busy
    times = [
        sorted(member.pool.came.get(index, np.inf) - when for number, member in enumerate(members) if number != place)
        for index, (place, when) in published.items()
    ]
    copies = sum(member.copies for member in members)
    size = sum(member.frames for member in members) / max(copies, 1)
    rates = (wires.got - got) / lasted, (wires.sent - sent) / lasted
    return _seen(np.array(times), copies, *rates, len(members), size, busy / max(copies, 1), lasted)


def _seen(
    times: Floats, copies: float, got: Floats, sent: Floats, nodes: int, size: float, cpu: float, seconds: float
) -> Seen:
    """`times` are (batches, other nodes), sorted."""
    arrived = np.isfinite(times)
    half = times[:, (times.shape[1] + 1) // 2 - 1]
    return Seen(
        nodes,
        len(times),
        float(arrived.mean()),
        copies / int(arrived.sum()),
        float(got.mean()),
        float(sent.mean()),
        float(half.mean()),
        float(times[:, -1].mean()),
        size,
        cpu,
        seconds,
    )


def _simulated(graph: Graph, links: Links, costs: Costs, real: Seen, seed: int) -> Seen:
    rng = np.random.default_rng(seed)
    nodes, cost = real.nodes, Cost(real.size * FRAMING, costs.check)
    rate = real.batches / real.seconds
    times, copies, sent, got = [], 0, np.zeros(nodes), np.zeros(nodes)
    for number in range(4 * real.batches):
        origin = np.array([number % nodes])
        wave = spread(graph, links, origin, cost, np.zeros(nodes), rng.random(nodes), rng)
        times.append(np.sort(np.delete(wave.arrival, origin)))
        copies += int(wave.copies_in.sum())
        sent += wave.copies_out
        got += wave.copies_in
    per_second = rate / len(times) * cost.size
    more = chatter(graph, np.full(nodes, rate), costs).mean()
    rates = got * per_second + more, sent * per_second + more
    seen = _seen(np.array(times), copies, *rates, nodes, real.size, 0.0, real.seconds)
    return replace(seen, batches=real.batches)


def _on_one_core(graph: Graph, links: Links, costs: Costs, real: Seen) -> Seen:
    nodes, cost = real.nodes, Cost(real.size * FRAMING, costs.check)
    found = [spread_exactly(graph, links, origin, cost, real.cpu) for origin in range(nodes)]
    times = np.array([np.sort(np.delete(arrival, origin)) for origin, (arrival, _) in enumerate(found)])
    copies = sum(copies for _, copies in found)
    rate = copies / nodes**2 * cost.size * real.batches / real.seconds
    rates = np.full(nodes, rate + chatter(graph, np.full(nodes, real.batches / real.seconds), costs).mean())
    seen = _seen(times, copies, rates, rates, nodes, real.size, real.cpu, real.seconds)
    return replace(seen, batches=real.batches)


def _scored(group: RolloutGroup, origin: str) -> ScoredGroup:
    size = len(group.completions)
    return ScoredGroup(group, origin, 1, (0.0,) * (size - 1) + (1.0,), (0.0,) * size)
