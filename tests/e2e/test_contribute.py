"""`swarmnode contribute` as a process of its own, and a node that admits what it sends."""

import json
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import pytest
import trio

from node.config import Config
from node.config_sources import load, parse_flag
from node.contributing.kept import FILE
from node.datadir import DataDir
from node.disk import Disk
from node.exchange import DurablePool
from node.identity import Identity
from node.network import Wiring, open_network
from node.stop import Stop
from p2p.swarm import Swarm
from rl.pool import SqlitePool
from rl.rollouts import ScoredGroup
from tests.node.test_network import QUIET, Watched
from verifiers.sandbox import open_sandbox
from verifiers.stream import TaskStream

pytestmark = pytest.mark.slow

ADDER = """
import os, sys
a, b = sys.stdin.read().rstrip("?\\n").split(" + ")
print(int(a) + int(b) + int(os.environ["SWARMNODE_SAMPLE"]) % 2)
"""


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    questions = tmp_path / "sums.jsonl"
    questions.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(99)))
    mix = json.dumps([{"verifier": "exact", "config": {"path": str(questions)}}])
    return [*QUIET, "storage.min_free_mb=0", f"tasks.mix={mix}", 'network.listen=["/ip4/127.0.0.1/tcp/0"]']


def contributor(path: Path, flags: list[str], *words: str, tasks: int = 3) -> subprocess.Popen[str]:
    settings = [word for flag in flags for word in ("--set", flag)]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "node.cli", "contribute", "--data-dir", str(path), "--tasks", str(tasks)),
            *settings,
            *words,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def answer_to_question(process: subprocess.Popen[str]) -> str:
    """Read until a task is shown."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith(" + 1?\n") and not line.startswith("Example: "):
            return str(int(line.partition(" ")[0]) + 1)
    raise AssertionError("it ended without a question")


def kept_by(path: Path) -> int:
    """Groups that a contributor has not noted as sent."""
    with closing(sqlite3.connect(f"{(path / FILE).as_uri()}?mode=ro", uri=True)) as connection:
        return int(connection.execute("SELECT count(*) FROM groups").fetchone()[0])


class Receiver:
    """A node's network, pool and verifiers."""

    def __init__(self, config: Config, swarm: Swarm, pool: SqlitePool) -> None:
        self.config, self.swarm, self.pool = config, swarm, pool

    def groups(self, origin: str) -> list[ScoredGroup]:
        return [group for group in self.pool.recent(100) if group.origin == origin]


@asynccontextmanager
async def receiving(path: Path, flags: list[str]) -> AsyncIterator[Receiver]:
    config = load([parse_flag(flag) for flag in (*flags, f"node.data_dir={path}")], environ={}).config
    view = Watched()
    async with AsyncExitStack() as stack:
        data = stack.enter_context(DataDir.open(path))
        identity = Identity.load_or_create(data.identity_path)
        pool = stack.enter_context(SqlitePool(data.pool_path, identity.node_id))
        sandbox = await stack.enter_async_context(open_sandbox(config.verifiers, []))
        stream = await TaskStream.open(sandbox, config.tasks.mix, 0)
        durable = DurablePool(pool, Disk(path, 0, Stop(), view.message))
        wiring = Wiring(config, data, identity, durable, lambda: 7, stream.makes, view)
        swarm = await stack.enter_async_context(open_network(wiring, sandbox))
        yield Receiver(config, swarm, pool)


async def test_what_a_program_answers_is_admitted_by_a_node_also_if_that_comes_later(
    tmp_path: Path, flags: list[str]
) -> None:
    path = tmp_path / "contributor"
    program = f"{sys.executable} -S -c {shlex.quote(ADDER)}"

    async def ended(process: subprocess.Popen[str], typed: str | None = None) -> str:
        with trio.fail_after(120):
            said, _ = await trio.to_thread.run_sync(process.communicate, typed)
        assert process.returncode == 0, said
        assert "Traceback" not in said
        return said

    # Nobody is there: what is answered stays.
    said = await ended(contributor(path, flags, "--command", program))
    assert "3 groups made, 0 sent; 3 are kept" in said
    origin = Identity.load(DataDir(path).identity_path).node_id
    async with receiving(tmp_path / "node", flags) as node:
        [address] = node.swarm.status().addresses
        # It hangs in its first answer, and is told to stop when what was kept has come.
        process = contributor(path, flags, "--join", address, "--command", "sleep 600")
        with trio.fail_after(120):
            while len(node.groups(origin)) < 3 or kept_by(path):
                await trio.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said = await ended(process)
        assert "0 groups made, 3 sent" in said
        for group in node.groups(origin):
            assert sorted(group.rewards) == [0.0, 1.0]
            assert group.group.task.kind == "sums"
        # A person, whose first answer is right: the last word is heard although the process ends at once.
        process = contributor(path, flags, "--join", address, tasks=1)
        with trio.fail_after(120):
            answer = await trio.to_thread.run_sync(answer_to_question, process)
        said = await ended(process, f"{answer}\n")
        assert "right\n" in said
        assert "1 groups made, 1 sent" in said
        with trio.fail_after(60):
            while len(node.groups(origin)) < 4:
                await trio.sleep(0.05)
        assert node.swarm.totals().rejected == {}
        [newest] = [group for group in node.groups(origin) if "" in [c.text for c in group.group.completions]]
        assert [completion.text for completion in newest.group.completions] == [answer, ""]
