"""The network of a node, opened as the daemon does it, over real sockets on loopback."""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import trio

from node.config import CheckedNetworkSettings
from node.config_sources import load, parse_flag
from node.datadir import DataDir
from node.disk import Disk
from node.exchange import DurablePool
from node.identity import Identity
from node.network import NetworkError, Refusals, Wiring, open_network, public_name
from node.record import Record
from node.snapshot import Snapshot, read_snapshot
from node.stop import Stop
from node.view import NodeInfo
from p2p.swarm import Swarm
from rl.pool import SqlitePool
from rl.rollouts import Completion, RolloutGroup, ScoredGroup
from tests.node.test_snapshot import Said
from verifiers.base import Task, TaskRef, is_held_out
from verifiers.sandbox import Sandbox

QUIET = ("network.mdns=false", "network.dht=false", "network.upnp=false")
REF = TaskRef("reasoning_gym", "1", "{}", 1, 1)
TRAINED = [n for n in range(20) if not is_held_out(f"{n} of 1?")][:3]


class Watched:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.said = Said()
        self.snapshots: list[Snapshot] = []

    def message(self, level: str, text: str) -> None:
        self.said(level, text)

    def network(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def started(self, info: NodeInfo) -> None: ...
    def phase(self, name: str) -> None: ...
    def progress(self, done: int, total: int, unit: str) -> None: ...
    def round_finished(self, record: Record, per_kind: Mapping[str, float], groups: Sequence[ScoredGroup]) -> None: ...


class Checker:
    """Makes one question of every reference, to which the answer is 1."""

    async def make(self, ref: TaskRef) -> Task:
        return Task(ref, "sum", f"{ref.index} of {ref.seed}?", None)

    async def score(self, task: Task, completions: Sequence[str]) -> list[float]:
        return [float(text == "1") for text in completions]


class Node:
    """What the daemon has of a node when it opens the network."""

    def __init__(self, path: Path, stack: AsyncExitStack, *settings: str) -> None:
        self.view = Watched()
        self.data = stack.enter_context(DataDir.open(path))
        self.identity = Identity.load_or_create(self.data.identity_path)
        config = load([parse_flag(text) for text in (f"node.data_dir={path}", *QUIET, *settings)], environ={}).config
        self.pool = stack.enter_context(SqlitePool(self.data.pool_path, self.identity.node_id))
        disk = Disk(path, 0, Stop(), self.view.message)
        durable = DurablePool(self.pool, disk)
        self._wiring = Wiring(config, self.data, self.identity, durable, lambda: 7, lambda ref: False, self.view)

    async def open(self, stack: AsyncExitStack) -> Swarm:
        """Raises NetworkError."""
        return await stack.enter_async_context(open_network(self._wiring, cast(Sandbox, Checker())))


def group(index: int, origin: str) -> ScoredGroup:
    """An own group with a right and a wrong answer."""
    ref = replace(REF, index=index)
    completions = (Completion("1", True), Completion("2", True))
    return ScoredGroup(
        RolloutGroup(Task(ref, "sum", f"{index} of 1?", None), completions, 0), origin, 1, (1, 0), (1, -1)
    )


async def test_what_one_node_shares_is_in_the_pool_of_another_and_to_be_seen_there(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first = Node(tmp_path / "a", stack, 'network.listen=["/ip4/127.0.0.1/tcp/0"]')
        one = await first.open(stack)
        (address,) = one.status().addresses
        second = Node(tmp_path / "b", stack, 'network.listen=["/ip4/127.0.0.1/tcp/0"]', f'network.join=["{address}"]')
        two = await second.open(stack)
        with trio.fail_after(20):
            assert await two.wait_for_peers(0, 0) == 0
            assert await one.wait_for_peers(1, 20) == 1
            assert await one.share([group(n, first.identity.node_id) for n in TRAINED], 1) == 1
            while len(second.pool.candidates(7, 1)) < 3:
                await trio.sleep(0.02)
            while not second.view.snapshots or second.view.snapshots[-1].admitted < 3:
                await trio.sleep(0.02)
        seen = second.view.snapshots[-1]
        assert (seen.connected, seen.received, seen.groups, seen.rejected) == (1, 1, 3, {})
        assert [(row.peer, row.groups) for row in seen.peers] == [(first.identity.node_id, 3)]
        written = read_snapshot(second.data.swarm_path, seen.pid)
        assert written is not None
        assert written.peer_id == second.identity.node_id
        left = trio.current_time()
    assert trio.current_time() - left < 5
    assert not second.data.swarm_path.exists(), "an ended node says nothing of its swarm"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


async def test_where_the_usual_port_is_taken_another_is_used_and_said(tmp_path: Path, taken: int) -> None:
    usual = CheckedNetworkSettings.model_construct(listen=[f"/ip4/127.0.0.1/tcp/{taken}"], _fields_set=set())
    async with AsyncExitStack() as stack:
        node = Node(tmp_path / "a", stack)
        node._wiring = replace(node._wiring, config=node._wiring.config.model_copy(update={"network": usual}))
        swarm = await node.open(stack)
        (address,) = swarm.status().addresses
        port = address.split("/")[4]
        assert port not in ("0", str(taken))
        assert any(level == "info" and f"port {port} instead" in text for level, text in node.view.said)


async def test_a_port_that_was_asked_for_and_is_taken_is_an_error(tmp_path: Path, taken: int) -> None:
    async with AsyncExitStack() as stack:
        node = Node(tmp_path / "a", stack, f'network.listen=["/ip4/127.0.0.1/tcp/{taken}"]')
        with pytest.raises(NetworkError, match=f"{taken}.*--listen"):
            await node.open(stack)


async def test_an_error_of_the_node_comes_out_of_the_network_as_itself(tmp_path: Path) -> None:
    async with AsyncExitStack() as outer:
        node = Node(tmp_path / "a", outer, 'network.listen=["/ip4/127.0.0.1/tcp/0"]')

        async def fail() -> None:
            async with AsyncExitStack() as stack:
                await node.open(stack)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()


def test_a_flood_of_refusals_is_a_line_a_minute() -> None:
    said = Said()
    refusals = Refusals(said)
    for second in range(121):
        refusals.tell({"signature": 1000 * second, "unknown_task": 1}, float(second))
    assert len(said) == 3
    assert said[0] == ("info", "refused from other nodes: unknown_task 1 (`swarmnode peers` says whose)")
    assert said[1][0] == "warning"
    assert "signature 60000 " in said[1][1]
    assert "signature 60000 " in said[2][1], "new ones alone"
    refusals.tell({"signature": 1000 * 120, "unknown_task": 1}, 999.0)
    assert len(said) == 3


def test_others_do_not_learn_where_this_machine_keeps_its_models(tmp_path: Path) -> None:
    (tmp_path / "secret" / "mine").mkdir(parents=True)
    assert public_name(str(tmp_path / "secret" / "mine")) == "mine"
    assert public_name("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
    assert public_name("/") == "model"
