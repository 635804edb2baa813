"""A node that trains alone, from the outside: it runs, stops, goes on, and loses nothing."""

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.record import Record
from tests.e2e.nodes import QUICK, RunningNode, StartNode

pytestmark = pytest.mark.slow

SEED = ("--seed", "5")


def gone(processes: list[psutil.Process], seconds: float = 5) -> bool:
    """Whether all of them ended in time."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not alive


def sockets_of(process: psutil.Process) -> list[Any]:
    """A process's sockets of the internet protocols; none of one that has just ended."""
    try:
        return list(process.net_connections(kind="inet"))
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunningNode:
    """A node that has done twelve rounds, with a checkpoint every four; to look at, and to copy."""
    place = tmp_path_factory.mktemp("finished")
    words = ("--silo", "--rounds", "12", *SEED, "--set", "checkpoint.every=4", *QUICK)
    node = RunningNode(place / "data", words, place / "data.log", "tiny", {})
    try:
        assert node.wait() == 0
    finally:
        if node.process.poll() is None:
            node.kill()
    return node


@pytest.fixture
def copied(finished: RunningNode, tmp_path: Path) -> Path:
    """A copy of that node's data directory, where `start_node` starts the next one."""
    return Path(shutil.copytree(finished.data_dir, tmp_path / "data"))


def test_a_run_of_three_rounds_leaves_three_records_and_no_process(start_node: StartNode) -> None:
    # Every import of node and learner is in the log, the worker's is its own.
    node = start_node("--rounds", "3", *QUICK, env={"PYTHONPROFILEIMPORTTIME": "1"})
    node.wait_for_round(1)
    children = node.children()
    sockets = [s for process in (psutil.Process(node.process.pid), *children) for s in sockets_of(process)]
    assert {socket.laddr.ip for socket in sockets} == {"127.0.0.1"}, "alone, it opens no network: this is the dashboard"
    assert node.wait() == 0
    imported = {line.rpartition("|")[2].strip() for line in node.log().splitlines() if "import time:" in line}
    assert "node.daemon" in imported
    assert not imported & {"libp2p", "node.network", "p2p.swarm"}
    records = node.records()
    assert [record["round"] for record in records] == [1, 2, 3]
    assert all(list(record) == list(Record.model_fields) for record in records)
    assert all(record["tokens_generated"] > 0 and record["local_groups"] == 2 for record in records)
    assert all(record["external_groups"] == 0 and record["rejected"] == {} for record in records)
    assert gone(children)
    # Started again with the same goal, there is nothing left to do, and nothing is done twice.
    assert start_node("--rounds", "3", *QUICK).wait() == 0
    assert node.rounds() == [1, 2, 3]


def test_killed_three_times_every_round_is_recorded_once(start_node: StartNode) -> None:
    moments = random.Random()
    seed = moments.randrange(2**32)
    print(f"seed of the moments: {seed}")
    moments.seed(seed)
    for last_seen in (5, 20, 40):
        # What was sampled ahead goes down with it, and whoever goes on may do so in either way.
        overlap = f"training.overlap={'true' if last_seen < 40 else 'false'}"
        node = start_node("--rounds", "60", "--set", "checkpoint.every=7", "--set", overlap, *QUICK)
        node.wait_for_round(last_seen)
        time.sleep(moments.uniform(0, 0.5))
        if node.process.poll() is None:
            children = node.children()
            node.kill()
            assert gone(children), "a child outlived its node"
    node = start_node("--rounds", "60", "--set", "checkpoint.every=7", *QUICK)
    assert node.wait() == 0
    assert node.rounds() == list(range(1, 61))
    assert "resuming after round" in node.log()


def test_a_killed_learner_is_replaced_and_costs_only_what_had_no_checkpoint(start_node: StartNode) -> None:
    node = start_node("--rounds", "20", "--set", "checkpoint.every=5", "--set", "training.overlap=true", *QUICK)
    node.wait_for_round(8)
    (learner,) = node.children("rl.learner_child")
    learner.kill()
    assert node.wait() == 0
    assert node.rounds() == list(range(1, 21))
    assert "SIGKILL" in node.log()
    assert "resuming after round" in node.log()


def test_a_signal_ends_it_cleanly_with_a_checkpoint_of_the_last_round_and_a_second_node_does_not(
    start_node: StartNode,
) -> None:
    done = 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        node = start_node("--set", "checkpoint.every=1000", *QUICK)
        node.wait_for_round(done + 3)
        if done > 0:
            assert f"resuming after round {done} " in node.log()
        else:
            second = start_node("--rounds", "1", *QUICK)
            assert second.wait(60) != 0
            assert f"process id {node.process.pid}" in second.log()
            node.wait_for_round(node.rounds()[-1] + 3)
        children = node.children()
        node.process.send_signal(number)
        assert node.wait(20) == 0, number.name
        assert gone(children), number.name
        done = node.rounds()[-1]
    again = start_node("--rounds", str(done + 2), "--set", "checkpoint.every=1000", *QUICK)
    assert again.wait() == 0
    assert again.rounds() == list(range(1, done + 3))
    assert f"resuming after round {done} " in again.log()


def test_a_signal_while_the_model_loads_ends_it_at_once(start_node: StartNode) -> None:
    node = start_node(*QUICK)
    node.wait_until(lambda: bool(node.children("rl.learner_child")))
    node.process.send_signal(signal.SIGTERM)
    assert node.wait(20) == 0
    assert node.rounds() == []


def test_a_damaged_checkpoint_falls_back_to_the_one_before(start_node: StartNode, copied: Path) -> None:
    newest = max((copied / "checkpoints").iterdir())
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(data)
    again = start_node("--rounds", "14", "--set", "checkpoint.every=4", *QUICK)
    assert again.wait() == 0
    assert again.rounds() == list(range(1, 15))
    assert "resuming after round 8 " in again.log()
    assert "damaged" in again.log()


def test_a_run_without_its_checkpoints_is_not_begun_again_in_silence(start_node: StartNode, copied: Path) -> None:
    # Another seed would give another run under the same name.
    other = start_node("--rounds", "14", "--seed", "6", *QUICK)
    assert other.wait() == 2
    assert "seed 5, not 6" in other.log()
    shutil.rmtree(copied / "checkpoints")
    again = start_node("--rounds", "12", *SEED, *QUICK)
    assert again.wait() == 1
    assert "no whole checkpoint" in again.log()
    assert again.rounds() == list(range(1, 13))


def measured(node: RunningNode) -> list[dict[str, Any]]:
    """What is in metrics.jsonl and does not depend on the clock."""
    timed = ("time", "seconds_")
    return [{key: value for key, value in r.items() if not key.startswith(timed)} for r in node.records()]


def test_runs_with_one_seed_are_alike_even_when_interrupted_and_evaluated(
    start_node: StartNode, finished: RunningNode
) -> None:
    evaluated = ("--set", "evaluation.every=3", "--set", "evaluation.tasks=9")
    cut = start_node(*SEED, "--set", "checkpoint.every=4", *QUICK, *evaluated)
    cut.wait_for_round(7)
    cut.kill()
    # As a kill between the checkpoint of round 6 and the evaluation leaves it.
    for later in (cut.data_dir / "checkpoints").glob("0*"):
        if int(later.name) > 6:
            shutil.rmtree(later)
    evaluations = cut.data_dir / "evaluations.jsonl"
    evaluations.write_bytes(evaluations.read_bytes().splitlines(keepends=True)[0])
    cut = start_node("--rounds", "12", *SEED, *QUICK, *evaluated)
    assert cut.wait() == 0
    assert measured(cut) == measured(finished)
    lines = [json.loads(line) for line in evaluations.read_text().splitlines()]
    assert [line["round"] for line in lines] == [3, 6, 9, 12]
    assert all(line["tasks"] == 9 and len(line["kinds"]) == 9 and line["k"] == 4 for line in lines)
    best = max(lines, key=lambda line: (line["sampled"], line["round"]))
    assert f"{best['round']:08}" in {path.name for path in (cut.data_dir / "checkpoints").iterdir()}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", place], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_pauses_the_node_and_corrupts_nothing(start_node: StartNode, small_disk: Path) -> None:
    node = start_node("--rounds", "30", "--set", "checkpoint.every=2", *QUICK, data_dir=small_disk / "data")
    node.wait_for_round(3)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(2**16))
            except OSError:
                break
    node.wait_until(lambda: "training pauses" in node.log())
    seen = node.rounds()
    time.sleep(2)
    assert node.process.poll() is None
    assert node.rounds()[: len(seen)] == seen
    ballast.unlink()
    assert node.wait() == 0
    assert node.rounds() == list(range(1, 31))
    assert "training goes on" in node.log()


def test_the_tiny_model_learns(start_node: StartNode) -> None:
    node = start_node("--rounds", "90", "--seed", "3", "--set", "storage.min_free_mb=0")
    assert node.wait() == 0
    rewards = [record["reward_local"] for record in node.records()]
    assert sum(rewards[-30:]) > 1.5 * sum(rewards[:30])


def test_the_real_model_trains_where_the_hub_is_out_of_reach(start_node: StartNode, tmp_path: Path) -> None:
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    node = start_node("--rounds", "1", "--set", "sampling.max_new_tokens=16", *QUICK, model="auto", env=env)
    assert node.wait() == 0
    (record,) = node.records()
    assert record["tokens_generated"] > 0
    assert "SmolLM2-135M" in node.log()
