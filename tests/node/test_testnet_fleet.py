"""The nodes of a testnet as processes, with small programs in place of nodes, and what is seen of them."""

import io
import json
import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import pytest
import trio
from rich.console import Console
from rich.live import Live

from node.datadir import DataDir
from node.record import MetricsFile
from node.testnet.fleet import Fleet, Member
from node.testnet.plan import NodePlan
from node.testnet.table import outcome, table
from node.testnet.view import ScreenView, open_view
from node.testnet.watch import LogTail, Progress
from tests.node.records import record

ROOT = Path(__file__).parents[2]
FINISHES_ROUNDS = """
import sys, time
from pathlib import Path
from node.record import MetricsFile
from tests.node.records import record
metrics = MetricsFile(Path(sys.argv[1]) / "metrics.jsonl")
last = metrics.last(1)
for number in range(last[0].round + 1 if last else 1, int(sys.argv[2]) + 1):
    metrics.append(record(number, external_groups=4, batches_sent=1, batches_received=3))
    time.sleep(0.01)
"""
WAITS = "import time; time.sleep(100)"


@dataclass(frozen=True, slots=True)
class Program(NodePlan):
    """A plan that starts something else."""

    def command(self, again: bool = False) -> list[str]:
        """`python -c` with the arguments."""
        return [sys.executable, "-c", *self.arguments]


def plan(path: Path, name: str, *arguments: str) -> NodePlan:
    """A node of this name that is a Python program, given its data directory."""
    (path / name).mkdir(exist_ok=True)
    code, *rest = arguments
    words = (code, str(path / name), *rest)
    return Program(name, path / name, path / f"{name}.log", "tiny", "", False, 0, False, words)


@pytest.fixture(autouse=True)
def _programs_find_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


async def run(*plans: NodePlan, kill_every: float | None = None, look: Callable[[Fleet], None] | None = None) -> Fleet:
    """Run nodes until all have ended."""
    fleet = Fleet(plans, lambda level, text: print(f"{level}: {text}"), kill_every, random.Random(1))
    with trio.fail_after(60):
        await fleet.run(lambda: look(fleet) if look is not None else None)
    return fleet


def states(fleet: Fleet) -> list[tuple[str, int | None]]:
    """State and exit status of each node."""
    return [(member.state, member.status) for member in fleet.members]


async def test_nodes_that_finish_are_done_and_one_that_fails_takes_none_along(tmp_path: Path) -> None:
    two = FINISHES_ROUNDS + "import time; time.sleep(0.5)"
    fleet = await run(plan(tmp_path, "a", two, "3"), plan(tmp_path, "b", two + "; sys.exit('broken')", "2"))
    assert states(fleet) == [("done", 0), ("failed", 1)]
    assert [member.progress.round for member in fleet.members] == [3, 2]
    fleet.members[1].log.read()
    assert list(fleet.members[1].log.last) == ["broken"]


async def test_where_none_can_start_the_others_are_not_waited_for(tmp_path: Path) -> None:
    fleet = await run(plan(tmp_path, "a", WAITS), plan(tmp_path, "b", "raise SystemExit(2)"))
    assert states(fleet) == [("stopped", 0), ("failed", 2)]


async def test_killed_nodes_are_started_again_and_end(tmp_path: Path) -> None:
    fleet = await run(*(plan(tmp_path, name, FINISHES_ROUNDS, "100") for name in "ab"), kill_every=0.8)
    assert states(fleet) == [("done", 0), ("done", 0)]
    assert sum(member.kills for member in fleet.members) >= 1
    assert [[step.round for step in m.progress.steps] for m in fleet.members] == [list(range(1, 101))] * 2


async def test_a_node_that_is_killed_again_and_again_without_a_round_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.testnet.fleet._RESTART_SECONDS", 0.01)
    fleet = await run(plan(tmp_path, "a", "import os; os.kill(os.getpid(), 11)"))
    assert states(fleet) == [("failed", -signal.SIGSEGV)]
    assert fleet.members[0].kills == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_stops_all_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    seen: list[psutil.Process] = []

    def stop_when_all_run(fleet: Fleet) -> None:
        if not seen and all(member.pid is not None for member in fleet.members):
            seen.extend(psutil.Process(member.pid) for member in fleet.members)
            os.kill(os.getpid(), number)

    fleet = await run(plan(tmp_path, "a", WAITS), plan(tmp_path, "b", WAITS), look=stop_when_all_run)
    assert states(fleet) == [("stopped", 0), ("stopped", 0)]
    assert len(seen) == 2
    assert not any(process.is_running() for process in seen)


async def test_a_second_signal_kills_those_that_do_not_listen(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); " + WAITS
    a = plan(tmp_path, "a", deaf)
    seen: list[int] = []

    def stop_twice(fleet: Fleet) -> None:
        if "deaf" in a.log.read_text():
            seen.append(fleet.members[0].pid or 0)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        await run(a, look=stop_twice)
    assert not psutil.pid_exists(seen[0])


def test_progress_follows_a_record_that_is_taken_back(tmp_path: Path) -> None:
    metrics, progress = MetricsFile(tmp_path / "metrics.jsonl"), Progress(tmp_path)
    progress.read()
    assert progress.round == 0
    for number in range(1, 8):
        metrics.append(record(number, reward_local=0.5, rejected={"stale": 1}))
        progress.read()
        assert progress.round == number
    with DataDir(tmp_path).metrics_path.open("ab") as file:
        file.write(b'{"round": 8, "ti')
    progress.read()
    assert progress.round == 7
    metrics.rewind(4)
    for number in range(5, 10):
        metrics.append(record(number, reward_local=0.25))
    progress.read()
    assert [(step.round, step.reward) for step in progress.steps] == [(n, 0.5 if n < 5 else 0.25) for n in range(1, 10)]
    assert progress.rejected == {"stale": 4}


def test_a_log_is_followed_without_its_rounds(tmp_path: Path) -> None:
    path = tmp_path / "node-1.log"
    path.write_text("of an earlier run\n")
    tail = LogTail(path)
    with path.open("a") as file:
        file.write("12:00:00 [info] node started node=x\n12:00:01 [info] round round=1 reward=0.0\n")
        file.write("12:00:02 [warning] careful\n    more of it\nhalf a li")
    assert tail.read() == [("info", "node started node=x"), ("warning", "careful"), ("warning", "    more of it")]
    with path.open("a") as file:
        file.write("ne\n")
    assert tail.read() == [("warning", "half a line")]
    assert tail.last[-1] == "half a line"


@pytest.fixture
def members(tmp_path: Path) -> list[Member]:
    """Three nodes, as after 40 rounds."""
    found = []
    for name in ("node-1", "node-2", "node-3"):
        member = Member(plan(tmp_path, name, ""))
        metrics = MetricsFile(tmp_path / name / "metrics.jsonl")
        for number in range(1, 41):
            rejected = {"wrong_prompt": 1} if name == "node-3" and number > 38 else {}
            counts = {"external_groups": 4, "local_groups": 4, "batches_sent": 1, "batches_received": 2, "peers": 2}
            metrics.append(record(number, reward_local=number / 40, rejected=rejected, **counts))
        member.look()
        found.append(member)
    return found


def screen(members: list[Member], width: int, height: int) -> list[str]:
    """The lines of the view on a terminal."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    view = ScreenView(console, Live(console=console, auto_refresh=False), "/testnet", 50)
    members[0].plan.log.write_text("12:00:00 [warning] \x1b[2Jcareful\n")
    view.say("info", "node-2 was killed")
    view.look(members)
    rendered = io.StringIO()
    Console(file=rendered, width=width, height=height, color_system=None).print(view._screen(members))
    return rendered.getvalue().splitlines()


def test_a_terminal_shows_a_row_a_node_and_what_they_say(members: list[Member]) -> None:
    lines = screen(members, 100, 30)
    text = "\n".join(lines)
    assert sum("40/50" in line and "4+4" in line and "█" in line for line in lines) == 3
    assert "rejected: wrong_prompt 2" in text
    assert "node-1: ·[2Jcareful" in text
    assert "\x1b" not in text
    assert "node-2 was killed" in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 10), (20, 4), (3, 1)])
def test_it_fits_every_terminal(members: list[Member], width: int, height: int) -> None:
    lines = screen(members, width, height)
    assert len(lines) <= max(1, height - 1)
    assert all(len(line) <= width for line in lines)


@pytest.fixture
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level


@pytest.mark.usefixtures("_logging_as_before")
def test_plain_lines_pass_on_warnings_and_say_how_far_it_is(
    members: list[Member], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.testnet.view._SPOKEN_SECONDS", 0.0)
    members[0].plan.log.write_text("12:00:00 [warning] careful\n12:00:00 [info] nothing\n")
    with open_view(True, "", None) as view:
        view.look(members)
    warned, progress = capsys.readouterr().err.splitlines()
    assert "node-1: careful" in warned
    assert "rounds 40 40 40" in progress
    assert "external_groups=480 sent=120 received=240" in progress.replace("'", "")
    assert "wrong_prompt 2" in progress


def test_the_outcome_is_a_row_a_node(members: list[Member]) -> None:
    outcomes = [outcome(member) for member in members]
    assert json.loads(json.dumps([asdict(each) for each in outcomes]))[2]["rejected"] == {"wrong_prompt": 2}
    head, *rows = table(outcomes)
    assert "mixed" in head
    assert rows[0].split() == ["node-1", "tiny", "training", "40", "0.512", "0.512", "40", "160", "40", "80", "none"]
    assert rows[2].endswith("wrong_prompt 2")
    assert any(line.startswith("mixed: ") for line in rows)


@pytest.mark.slow
def test_no_node_outlives_a_testnet_that_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "node.cli", "testnet", "--nodes", "2", "--dir", str(tmp_path / "t"), "--no-tty"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    testnet = psutil.Process(process.pid)
    with process:
        while len(testnet.children(recursive=True)) < 4:
            assert process.poll() is None
        children = testnet.children(recursive=True)
        process.kill()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
