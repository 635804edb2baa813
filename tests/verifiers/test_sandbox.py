"""What strangers' answers can do to a node: nothing."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import trio

from verifiers.base import MAX_SEED, Task, TaskRef, UnknownTask, VerifierError
from verifiers.sandbox import Sandbox, SandboxError, open_sandbox
from verifiers.settings import VerifierSettings

QUICK = VerifierSettings(answer_seconds=1.0, memory_mb=1024)


@asynccontextmanager
async def opened(settings: VerifierSettings = QUICK) -> AsyncIterator[tuple[Sandbox, Task]]:
    async with open_sandbox(settings, []) as sandbox:
        version, config = await sandbox.canonical("obedient", {})
        yield sandbox, await sandbox.make(TaskRef("obedient", version, config, 1, 2))


async def test_a_verifier_of_another_package_makes_and_scores(obedient: str) -> None:
    settings = QUICK.model_copy(update={"options": {obedient: {"greeting": "good day"}}})
    async with opened(settings) as (sandbox, task):
        assert (task.kind, task.prompt, task.answer) == (obedient, "good day 2", "right")
        assert task.ref.version == "3"
        answers = ["right", "wrong", "I think <answer>wrong</answer> no <answer> right </answer>"]
        assert await sandbox.score(task, answers) == [1.0, 0.0, 1.0]
        assert sandbox.outcomes == {"scored": 3}


async def test_unknown_verifier_names_the_nearest() -> None:
    async with open_sandbox(QUICK, []) as sandbox:
        with pytest.raises(UnknownTask, match=r"did you mean 'reasoning_gym'.*command, exact, math, reasoning_gym"):
            await sandbox.canonical("reasoning_gim", {})
        with pytest.raises(UnknownTask, match="nonsense"):
            await sandbox.make(TaskRef("nonsense", "1", "{}", 0, 0))


async def test_options_that_a_verifier_does_not_take_are_an_error(obedient: str) -> None:
    async with open_sandbox(QUICK.model_copy(update={"options": {obedient: {"tone": "curt"}}}), []) as sandbox:
        with pytest.raises(VerifierError, match=r"\[verifiers.options.obedient\].*tone"):
            await sandbox.canonical(obedient, {})


@pytest.mark.usefixtures("obedient")
@pytest.mark.parametrize(
    ("order", "outcome"),
    [
        ("do hang", "timeout"),
        ("do exit 0", "crashed"),
        ("do memory", "memory"),
        ("do raise an error", "raised"),
        ("do garbage", "crashed"),
        ("do reply to another", "crashed"),
        ("do reply no number", "crashed"),
        ("do give nan", "raised"),
        ("x" * 9000, "refused"),
        ("x" * 300_000, "refused"),
    ],
)
async def test_a_bad_answer_scores_zero_and_spoils_no_other(order: str, outcome: str) -> None:
    async with opened() as (sandbox, task):
        assert await sandbox.score(task, ["right", order, "right", "wrong", "right"]) == [1, 0, 1, 0, 1]
        assert sandbox.outcomes[outcome] == 1
        assert await sandbox.score(task, ["right"]) == [1]


@pytest.mark.usefixtures("obedient")
async def test_a_worker_that_is_silent_after_the_last_answer_spoils_none() -> None:
    async with opened() as (sandbox, task):
        assert await sandbox.score(task, ["wrong", "do silence"]) == [0, 1]
        assert sandbox.outcomes == {"scored": 2}
        assert await sandbox.score(task, ["right"]) == [1]


@pytest.mark.usefixtures("obedient")
async def test_a_node_that_stood_still_does_not_blame_the_worker() -> None:
    rewards: list[float] = []

    async with opened() as (sandbox, task):

        async def score() -> None:
            rewards.extend(await sandbox.score(task, ["do take 0.5", "right"]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(score)
            await trio.sleep(0.1)
            time.sleep(QUICK.answer_seconds + 2)  # as under SIGSTOP
        assert rewards == [1, 1]
        assert sandbox.restarts == 0


@pytest.mark.usefixtures("obedient")
async def test_memory_that_earlier_work_keeps_costs_later_work_nothing() -> None:
    """Ten times 300 MB are more than a worker may have, and each alone is not."""
    async with opened() as (sandbox, task):
        assert await sandbox.score(task, ["do hoard 300"] * 10) == [1] * 10
        assert sandbox.outcomes == {"scored": 10}
        refs = [TaskRef("obedient", "3", '{"do":"!do hoard 300"}', 0, index) for index in range(10)]
        assert [(await sandbox.make(ref)).ref for ref in refs] == refs
        assert sandbox.restarts >= 4


@pytest.mark.usefixtures("obedient")
async def test_many_open_tags_are_read_in_time() -> None:
    async with opened() as (sandbox, task):
        assert await sandbox.score(task, ["<answer>" * 2**15, "right"]) == [0, 1]
        assert sandbox.outcomes == {"refused": 1, "scored": 1}


@pytest.mark.usefixtures("obedient")
async def test_only_answers_that_got_a_reward_are_counted() -> None:
    async with opened() as (sandbox, task):
        unknown = dataclasses.replace(task, ref=dataclasses.replace(task.ref, verifier="nonsense"))
        with pytest.raises(UnknownTask):
            await sandbox.score(unknown, ["right", "x" * 300_000])
        with trio.move_on_after(0.3):
            await sandbox.score(task, ["right", "do hang"])
        assert not sandbox.outcomes


@pytest.mark.usefixtures("obedient")
@pytest.mark.parametrize("change", [{"seed": -1}, {"seed": MAX_SEED + 1}, {"index": -1}, {"index": MAX_SEED + 1}])
async def test_seeds_and_indices_out_of_range_are_refused_for_any_verifier(change: dict[str, int]) -> None:
    async with opened() as (sandbox, task):
        ref = dataclasses.replace(task.ref, seed=change.get("seed", 0), index=change.get("index", 0))
        with pytest.raises(UnknownTask, match="between 0 and"):
            await sandbox.make(ref)
        with pytest.raises(UnknownTask, match="between 0 and"):
            await sandbox.score(dataclasses.replace(task, ref=ref), ["right"])


@pytest.mark.usefixtures("obedient")
async def test_output_of_a_scorer_goes_nowhere() -> None:
    async with opened() as (sandbox, task):
        assert await sandbox.score(task, ["do print", "right", "wrong"]) == [1, 1, 0]
        assert sandbox.restarts == 0


@pytest.mark.usefixtures("obedient")
async def test_rewards_are_binary_unless_graded() -> None:
    answers = ["do give 0.4", "do give 0.9999999999", "do give 7", "do give -1"]
    async with opened() as (sandbox, task):
        assert await sandbox.score(task, answers) == [0, 1, 1, 0]
    async with opened(QUICK.model_copy(update={"graded": True})) as (sandbox, task):
        assert await sandbox.score(task, answers) == [0.4, 0.9999999999, 1, 0]


@pytest.mark.usefixtures("obedient")
async def test_text_that_is_not_unicode_is_only_wrong() -> None:
    async with opened() as (sandbox, task):
        assert await sandbox.score(task, ["\ud800", "right"]) == [0, 1]


@pytest.mark.usefixtures("obedient")
@pytest.mark.parametrize("order", ["hang", "memory", "exit 1", "raise something"])
async def test_a_task_that_cannot_be_made_is_an_error(order: str) -> None:
    async with opened() as (sandbox, task):
        with pytest.raises(VerifierError):
            await sandbox.make(TaskRef("obedient", "3", f'{{"do":"!do {order}"}}', 0, 0))
        assert await sandbox.score(task, ["right"]) == [1]


@pytest.mark.usefixtures("obedient")
async def test_a_worker_killed_from_outside_costs_nothing() -> None:
    async with opened(VerifierSettings(answer_seconds=30)) as (sandbox, task):
        rewards: list[float] = []

        async def score() -> None:
            rewards.extend(await sandbox.score(task, ["right", "do sleep 1", "wrong", "right"]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(score)
            await trio.sleep(0.3)
            os.kill(sandbox.pids[0], signal.SIGKILL)
        assert rewards == [1, 1, 0, 1]
        os.kill(sandbox.pids[0], signal.SIGKILL)
        assert await sandbox.score(task, ["right"]) == [1]
        assert sandbox.restarts == 2


@pytest.mark.usefixtures("obedient")
async def test_cancelled_calls_leave_the_sandbox_in_order() -> None:
    async with opened(VerifierSettings(answer_seconds=30)) as (sandbox, task):
        with trio.move_on_after(0.2):
            await sandbox.score(task, ["right", "do sleep 20"])
        with trio.move_on_after(0):
            await sandbox.make(task.ref)
        assert await sandbox.score(task, ["wrong", "right"]) == [0, 1]
        assert await sandbox.make(task.ref) == task


@pytest.mark.usefixtures("obedient")
async def test_workers_share_the_load_and_one_that_hangs_holds_up_no_other() -> None:
    async with opened(VerifierSettings(workers=2, answer_seconds=2)) as (sandbox, task):
        await sandbox.ready()
        assert len(sandbox.pids) == 2
        done: list[str] = []

        async def score(name: str, answers: list[str], expected: list[float]) -> None:
            assert await sandbox.score(task, answers) == expected
            done.append(name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(score, "hanging", ["do hang", "right"], [0.0, 1.0])
            for _ in range(3):
                nursery.start_soon(score, "quick", ["right", "wrong"], [1.0, 0.0])
        assert done == ["quick"] * 3 + ["hanging"]


async def test_no_process_outlives_the_sandbox(obedient: str) -> None:
    async with opened() as (sandbox, task):
        with trio.move_on_after(0.2):
            await sandbox.score(task, ["do hang"])
        await sandbox.make(task.ref)
        (pid,) = sandbox.pids
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_workers_die_with_a_node_that_is_killed(obedient: str) -> None:
    node = subprocess.Popen([sys.executable, "-c", _NODE, obedient], stdout=subprocess.PIPE, text=True)
    try:
        assert node.stdout is not None
        worker = psutil.Process(int(node.stdout.readline()))
        node.kill()
        worker.wait(timeout=30)
    finally:
        node.kill()
        node.wait()
    assert not worker.is_running()


_NODE = """
import sys, trio
from verifiers.base import TaskRef
from verifiers.sandbox import open_sandbox
from verifiers.settings import VerifierSettings

async def main():
    async with open_sandbox(VerifierSettings(answer_seconds=600), []) as sandbox:
        version, config = await sandbox.canonical(sys.argv[1], {})
        task = await sandbox.make(TaskRef(sys.argv[1], version, config, 0, 0))
        print(*sandbox.pids, flush=True)
        await sandbox.score(task, ["do hang"])

trio.run(main)
"""


@pytest.mark.usefixtures("obedient")
async def test_secrets_files_and_network_are_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretive")
    target = tmp_path / "written"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        async with opened() as (sandbox, task):
            orders = ["do environment hf_secretive", "do environment C.UTF-8", f"do write {target}"]
            assert await sandbox.score(task, orders) == [0, 1, 0]
            assert not target.exists() or target.read_bytes() == b""
            assert set(sandbox.isolation) == {"network", "privileges", "memory", "files", "secrets", "processes"}
            assert sandbox.isolation["memory"]
            assert sandbox.isolation["files"]
            if not sandbox.isolation["network"]:
                pytest.skip("this system does not let an ordinary process give up its network")
            assert await sandbox.score(task, [f"do connect {port}"]) == [0]


async def test_a_sandbox_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "msgpack.py").write_text("raise ImportError('a broken msgpack')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with open_sandbox(QUICK, []) as sandbox:
        with pytest.raises(SandboxError, match="a broken msgpack"):
            await sandbox.ready()
        with pytest.raises(SandboxError, match="a broken msgpack"):
            await sandbox.canonical("reasoning_gym", {"dataset": "bf"})


def test_heavy_packages_stay_in_the_worker() -> None:
    heavy = "assert not {{'torch', 'transformers'{more}}} & set(sys.modules)"
    node = "import sys, verifiers.stream, verifiers.sandbox; " + heavy.format(
        more=", 'reasoning_gym', 'sympy', 'numpy'"
    )
    worker = "import sys, verifiers.worker, verifiers.reasoning_gym, verifiers.math; " + heavy.format(more="")
    for code in (node, worker):
        subprocess.run([sys.executable, "-c", code], check=True)
