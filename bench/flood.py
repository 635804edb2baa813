"""A node that pours out right rollouts: `python -m bench.flood ADDRESS --batches 20`, for `bench.rounds --flood`.

What it sends is good by every rule: tasks of the product's own mix, drawn once, with other answers each time, so that
all of it has to be made and scored anew by whoever hears it. It sends what one node may send by default, which is twice
what a node of this project would.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from typing import NoReturn

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.config import Config
from p2p.gossip import topic_of
from p2p.host import HostSettings, open_host
from p2p.host.host import Host
from p2p.settings import AdmissionSettings, NetworkSettings
from p2p.swarm import Watcher, open_swarm
from p2p.wire import seal_round
from rl.rollouts import Completion, RolloutGroup
from verifiers.base import Task
from verifiers.sandbox import open_sandbox
from verifiers.stream import TaskStream

GROUPS, ANSWERS = 8, 8
"""Of a batch, as a round of the product has them."""


async def draw(config: Config, count: int) -> list[Task]:
    """Tasks of the product's mix."""
    async with open_sandbox(config.verifiers, []) as sandbox:
        return await (await TaskStream.open(sandbox, config.tasks.mix, 4711)).draw(count)


async def flood(address: str, batches: float) -> NoReturn:
    """Send so many batches a second, once somebody listens, for ever."""
    config, key = Config(), Ed25519PrivateKey.generate()
    tasks = await draw(config, GROUPS)
    answers = itertools.count()

    def listening(watcher: Watcher) -> AbstractAsyncContextManager[Host]:
        return open_host(HostSettings(key=key), watcher)

    async with open_swarm(
        listening,
        key,
        NetworkSettings(join=[address], mdns=False, dht=False, upnp=False),
        AdmissionSettings(),
        None,
        None,
        round=lambda: 1,
        model="none",
        say=lambda level, text: None,
    ) as swarm:
        topic = topic_of("main", 0)
        while not swarm.transport.mesh(topic):
            await trio.sleep(0.1)
        sequences, due = itertools.count(1), trio.current_time()
        for number in itertools.count(1):
            groups = [
                RolloutGroup(task, tuple(Completion(text, True) for text in _answers(task, answers)), 1)
                for task in tasks
            ]
            for envelope in seal_round(key, "main", number, "none", groups, lambda: next(sequences), time.time()):
                await swarm.transport.publish(topic, envelope.data)
            due += 1 / batches
            await trio.sleep_until(due)
    raise AssertionError("a count has no end")


def _answers(task: Task, wrong: Iterator[int]) -> list[str]:
    """The right one, where a verifier tells it, among wrong ones: a group that a round may choose."""
    return [task.answer or "", *(str(next(wrong)) for _ in range(ANSWERS - 1))]


def main() -> None:
    """Until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="of a node, as it prints it")
    parser.add_argument("--batches", type=float, default=20.0, help="a second")
    arguments = parser.parse_args()
    trio.run(flood, arguments.address, arguments.batches)


if __name__ == "__main__":
    main()
