"""The simulation of scale: its meshes and its spreading are held against the product's router and an exact one."""

import json
import random
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from bench import scale
from bench.scaling import real
from bench.scaling.costs import Costs, write_costs
from bench.scaling.exact import spread_exactly
from bench.scaling.graph import Graph, build, snapshot
from bench.scaling.links import Links, draw, uniform
from bench.scaling.plan import Plan, recommended, shards_for
from bench.scaling.spread import Cost, spread
from bench.scaling.topology import HIGH, LOW, Net
from bench.scaling.use import use
from bench.scaling.world import World
from p2p.host.cache import Link
from p2p.host.gossip import Gossip
from p2p.host.messages import parse
from p2p.host.scores import Scores
from p2p.transport import Verdict

COSTS = Costs(1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 9_600, 9_800, 25_000, 34, 51)
COST = Cost(COSTS.message, COSTS.check)


def grown(plan: Plan) -> Net:
    net = Net(plan, random.Random(plan.seed))
    net.grow(plan.nodes)
    return net


def shown(net: Net, links: Links, **states: Mapping[int, bool]) -> Graph:
    """All nodes are there and give, unless it says otherwise."""
    alive, gives = ([states.get(name, {}).get(node, True) for node in range(len(net))] for name in ("alive", "gives"))
    return snapshot(net, links, np.array(alive), np.array(gives))


def routers(net: Net) -> dict[str, Gossip]:
    """The product's routers with the same connections, made in the same order."""
    made = {
        str(node): Gossip(str(node), bytes.decode, Scores(None), lambda peer, what: None, lambda peer: False)
        for node in range(len(net))
    }

    def pass_on() -> None:
        while any(link.outbox._bytes for router in made.values() for link in router.links.values()):
            for name, router in made.items():
                for link in router.links.values():
                    while frames := link.outbox._urgent or link.outbox._frames:
                        frame = frames.popleft()
                        link.outbox._bytes -= len(frame)
                        other = made[link.peer]
                        rpc = parse(frame[1:])
                        for option in rpc.subscriptions:
                            other.subscription(other.links[name], option.topicid, option.subscribe)
                        if rpc.HasField("control"):
                            other.control(other.links[name], rpc.control)

    for router in made.values():
        router.subscribe("topic", lambda peer, data: Verdict.ACCEPT, lambda peer, data: None)
    for node in range(len(net)):
        for peer in [peer for peer, dialled in net.links[node].items() if dialled]:
            for one, other in ((node, peer), (peer, node)):
                link = made[str(one)].links[str(other)] = Link(str(other), outbound=one == node)
                made[str(one)].up(link)
            pass_on()
    for _ in range(3):
        for router in made.values():
            router.heartbeat()
        pass_on()
    return made


async def test_meshes_are_as_those_of_the_products_routers() -> None:
    net = grown(Plan(60, 1, 1))
    real_ones = [len(router.topics["topic"].mesh) for router in routers(net).values()]
    simulated = [len(mesh) for [mesh] in net.mesh]
    assert min(simulated) >= min(LOW, *real_ones)
    assert max(simulated) <= max(HIGH, *real_ones)
    assert statistics.fmean(simulated) == pytest.approx(statistics.fmean(real_ones), abs=0.5)


@pytest.mark.parametrize("seed", range(3))
def test_batches_spread_as_they_do_event_by_event(seed: int) -> None:
    net = grown(Plan(40, 1, 1, seed=seed))
    rng = np.random.default_rng(seed)
    links = draw(40, 0.5, rng)
    graph, everyone = shown(net, links), np.ones(40, dtype=np.bool_)
    kept = graph.in_mesh
    # The meshes alone, without offers.
    ways = graph.source[kept], graph.target[kept], kept[kept]
    mesh = build(graph.node, graph.topic, *ways, links.between, everyone, everyone)
    origin, idle = int(rng.integers(40)), np.zeros(40)
    wave = spread(mesh, links, np.array([origin]), COST, idle, idle, rng)
    arrival, copies = spread_exactly(mesh, links, origin, COST)
    assert wave.arrival == pytest.approx(arrival, rel=0.03)
    assert int(wave.copies_in.sum()) == pytest.approx(copies, rel=0.03)


def test_what_no_mesh_brings_comes_by_offers_at_heartbeats() -> None:
    net = grown(Plan(30, 1, 1))
    links = uniform(30, 1e6, 0.05)
    idle, rng = np.zeros(30), np.random.default_rng(1)
    cut = next(node for node in range(1, 30) if len(net.links[node]) > len(net.mesh[node][0]))
    for peer in net.mesh[cut][0]:
        net.mesh[peer][0].discard(cut)
    net.mesh[cut][0].clear()
    late = spread(shown(net, links), links, np.array([0]), COST, idle, idle, rng)
    assert late.asked[cut] == 1
    assert 0.15 < late.arrival[cut] - late.arrival.min() < 2.5
    assert np.isfinite(late.arrival).all()


def test_nodes_that_are_gone_get_nothing_and_cost_the_uplinks_of_those_that_have_not_noticed() -> None:
    net = grown(Plan(50, 1, 1))
    links, idle = uniform(50, 1e6, 0.05), np.zeros(50)
    dead = dict.fromkeys(range(1, 50, 5), False)
    wave = spread(shown(net, links, alive=dead), links, np.array([0]), COST, idle, idle, np.random.default_rng(1))
    assert not np.isfinite(wave.arrival[list(dead)]).any()
    assert wave.copies_in[list(dead)].sum() == 0 < wave.copies_out.sum() - wave.copies_in.sum()


def small(nodes: int, shards: int, looking: bool = True, churn: float = 0.0, riders: float = 0.0) -> Plan:
    return Plan(nodes, shards, min(2, shards), looking, churn, riders, messages=12)


def test_bytes_stay_flat_with_shards_by_size_and_grow_without() -> None:
    few, many = (World(small(nodes, nodes // 50), COSTS).run() for nodes in (200, 800))
    assert few.delivered == many.delivered == 1
    assert many.bytes_in.mean < 1.2 * few.bytes_in.mean
    assert many.swarm_seen == pytest.approx(few.swarm_seen / 4, rel=0.2)
    one = World(small(800, 1), COSTS).run()
    assert one.bytes_in.mean > 5 * many.bytes_in.mean


def test_without_looking_for_shards_few_batches_arrive() -> None:
    assert World(small(400, 40, looking=False), COSTS).run().delivered < 0.2
    assert World(small(400, 40), COSTS).run().delivered > 0.95


def test_churn_and_riders_cost_what_they_must() -> None:
    plans = small(200, 2), small(200, 2, churn=0.3), small(200, 2, riders=0.2)
    base, churn, riders = (World(plan, COSTS).run() for plan in plans)
    assert churn.delivered > 0.99
    assert churn.catch_up > 2 * base.catch_up
    assert riders.delivered > 0.99
    assert riders.batches == pytest.approx(0.8 * base.batches, rel=0.1)
    assert riders.half.mean > base.half.mean


def test_a_node_admits_what_it_hears_and_trains_on_a_part_of_it() -> None:
    few, many = (use(heard, COSTS, 30.0, rounds=6) for heard in (2, 20))
    for seen in (few, many):
        assert seen.admitted > 0.98
        assert seen.wait >= COSTS.admit
    assert few.used > many.used
    assert many.trained > few.trained


def test_the_rule_for_shards() -> None:
    assert [shards_for(nodes) for nodes in (2, 100, 1_000, 100_000)] == [1, 1, 10, 1000]
    assert shards_for(10**7) == 1024, "the most that the protocol has"
    assert recommended(50).subscribe == 1


def test_the_whole_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    costs, found, plot = (tmp_path / name for name in ("costs.json", "found.json", "scale.png"))
    write_costs(COSTS, costs)
    options = ["--smoke", "--no-real", "--out", tmp_path, "--costs", costs, "--json", found, "--plot", plot]
    monkeypatch.setattr(sys, "argv", ["scale", *map(str, options)])
    scale.main()
    tables = capsys.readouterr().out
    assert "| 300 | by the rule | 2 of 3 |" in tables
    assert json.loads(found.read_text())["costs"]["message"] == COSTS.message
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_real_nodes_do_what_the_simulation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "_SETTLE", 2.0)
    monkeypatch.setattr(real, "_GRACE", 2.0)
    seen, simulated, shared = real.compare(5, 2.0, 1.0, COSTS)
    assert seen.delivered == simulated.delivered == 1
    assert simulated.copies == pytest.approx(seen.copies, rel=0.15)
    assert simulated.bytes_in == pytest.approx(seen.bytes_in, rel=0.3)
    assert shared.half > simulated.half
