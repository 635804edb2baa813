"""The learner as a process of its own, over a real channel."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio
from pydantic import TypeAdapter

from rl.advantage import advantages
from rl.learner_child import _Server, _Stop
from rl.rollouts import Completion, RolloutGroup, Sampling, ScoredGroup, UpdateStats
from tests.rl.learning import as_text
from verifiers.base import Task, TaskRef
from verifiers.codec import MAX_FRAME
from verifiers.process import Channel, Child, spawn

ENV = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
TASKS = [Task(TaskRef("t", "1", "{}", 0, i), "sum", f"{i} + 1?", None) for i in range(2)]


def settings(model_dir: Path, **training: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(model_dir), "device": "cpu"},
        "lora": {"rank": 4},
        "training": {"lr": 0.01, **training},
    }


@asynccontextmanager
async def child(first: dict[str, Any], log: Path | None = None) -> AsyncIterator[tuple[Child, dict[str, Any]]]:
    with open(log or os.devnull, "wb") as stderr:
        process = spawn("rl.learner_child", env=ENV, stderr=stderr.fileno())
    try:
        await process.frames.send(first)
        yield process, await process.frames.receive()
    finally:
        await process.kill()


async def ask(process: Child, op: str, number: int = 1, **args: Any) -> tuple[dict[str, Any], list[Any]]:
    """The answer to a request, and the frames that came before it."""
    await process.frames.send({"id": number, "op": op, "args": args})
    before: list[Any] = []
    while "ok" not in (frame := await process.frames.receive()):
        assert frame["id"] == number
        before.append(frame)
    return frame, before


def generate_args(samples: int = 4, tokens: int = 8) -> dict[str, Any]:
    tasks = TypeAdapter(list[Task]).dump_python(TASKS)
    return {
        "tasks": tasks,
        "sampling": TypeAdapter(Sampling).dump_python(Sampling(samples, tokens)),
        "seed": 1,
        "base": False,
    }


async def test_a_life(model_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with child({"settings": settings(model_dir), "trained": None}, log) as (process, first):
        assert first["ready"]["model"] == str(model_dir)
        answer, progress = await ask(process, "generate", 7, **generate_args())
        assert answer["id"] == 7
        assert progress[-1]["progress"] == [8, 8, "completions"]
        groups = TypeAdapter(list[RolloutGroup]).validate_python(answer["result"])
        assert [group.task for group in groups] == TASKS
        rewards = (1.0, 0.0, 0.0, 1.0)
        scored = [ScoredGroup(group, "me", 1, rewards, advantages(rewards)) for group in groups]
        answer, _ = await ask(process, "update", groups=TypeAdapter(list[ScoredGroup]).dump_python(scored), seed=1)
        assert TypeAdapter(UpdateStats).validate_python(answer["result"]).policy_step == 1
        others = [replace(scored[0], group=as_text(scored[0].group)), replace(scored[1], advantages=(0.0,) * 4)]
        answer, _ = await ask(process, "fits", groups=TypeAdapter(list[ScoredGroup]).dump_python(others))
        assert answer["result"] == [True, False]
        (tmp_path / "saved").mkdir()
        assert (await ask(process, "save", directory=str(tmp_path / "saved")))[0]["ok"]
        assert (await ask(process, "load", directory=str(tmp_path / "saved")))[0]["ok"]
        sampling = TypeAdapter(Sampling).dump_python(Sampling(1, 20))
        messages = [{"role": "user", "content": "1?"}]
        answer, pieces = await ask(process, "chat", messages=messages, sampling=sampling, seed=1)
        assert answer["result"]["text"].startswith("".join(frame["text"] for frame in pieces))
        # What it cannot do it says, and goes on.
        answer, _ = await ask(process, "load", directory=str(tmp_path / "nowhere"))
        assert answer["error"]["type"] == "CheckpointError"
        answer, _ = await ask(process, "save", directory=str(tmp_path / "nowhere"))
        assert answer["error"]["type"] in ("FileNotFoundError", "OSError")
        assert (await ask(process, "describe"))[0]["result"]["policy_step"] == 1
        await process.frames.aclose()
        with trio.fail_after(30):
            assert await process.wait() == 0
    lines = log.read_text().splitlines()
    assert lines
    assert all(line.split()[0] in ("INFO", "WARNING") for line in lines)
    # What libraries tell their developers is nothing for an operator.
    assert not [line for line in lines if "deprecated" in line]


async def test_a_model_that_cannot_be_loaded_is_an_answer(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with child({"settings": settings(tmp_path), "trained": None}, log) as (process, first):
        assert first["error"]["type"] == "ModelError"
        assert "config.json" in first["error"]["message"]
        with trio.fail_after(30):
            assert await process.wait() == 1
    assert "Traceback" not in log.read_text()


async def test_a_fault_is_told_and_ends_the_process(model_dir: Path) -> None:
    async with child({"settings": settings(model_dir), "trained": None}) as (process, _):
        answer, _ = await ask(process, "generate", tasks=[])
        assert answer["error"]["type"] == "KeyError"
        assert "learner_child" in answer["error"]["traceback"]
        with trio.fail_after(30):
            assert await process.wait() != 0


class Talker:
    """A learner with too much to say about itself."""

    def describe(self) -> bytes:
        return bytes(MAX_FRAME)

    def generate(self, *args: object, **settings: object) -> list[RolloutGroup]:
        return [RolloutGroup(TASKS[0], (Completion("x" * MAX_FRAME, True),), 0)]

    def save(self, directory: Path) -> None:
        """Nothing to save."""

    load = save
    export = save


def test_an_answer_too_long_to_send_is_an_error_and_no_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        parent = Channel(ours)
        parent.send({"id": 1, "op": "describe", "args": {}})
        parent.send({"id": 2, "op": "generate", "args": generate_args()})
        parent.send({"id": 3, "op": "save", "args": {"directory": "."}})
        ours.shutdown(socket.SHUT_WR)
        channel = Channel(theirs)
        _Server(channel, Talker(), _Stop(channel)).serve()
        answer = parent.receive()
        assert (answer["id"], answer["error"]["type"]) == (1, "AnswerError")
        answer = parent.receive()
        assert (answer["id"], answer["error"]["type"]) == (2, "AnswerError")
        for setting in ("sharing.local", "sampling.group_size", "sampling.max_new_tokens", "evaluation.per_task"):
            assert setting in answer["error"]["message"]
        assert parent.receive() == {"id": 3, "ok": True, "result": None}


async def test_sigterm_stops_the_work_and_saving_still_works(model_dir: Path, tmp_path: Path) -> None:
    async with child({"settings": settings(model_dir), "trained": None}) as (process, _):
        args = generate_args(samples=64, tokens=400)
        await process.frames.send({"id": 1, "op": "generate", "args": args})
        assert "progress" in await process.frames.receive()
        process.signal(signal.SIGINT)
        process.signal(signal.SIGTERM)
        with trio.fail_after(30):
            while "ok" not in (answer := await process.frames.receive()):
                pass
        assert answer["error"]["type"] == "Stopped"
        assert (await ask(process, "update", groups=[], seed=1))[0]["error"]["type"] == "Stopped"
        assert (await ask(process, "save", directory=str(tmp_path)))[0]["ok"]
        assert (tmp_path / "policy.json").exists()
        assert (await ask(process, "describe"))[0]["ok"]


PARENT = """
import os, sys, time
from verifiers.process import spawn
import trio
async def main():
    child = spawn("rl.learner_child", env=dict(os.environ))
    await child.frames.send({"settings": {"model": {"name": sys.argv[1], "device": "cpu"}}, "trained": None})
    await child.frames.receive()
    print(child.pid, flush=True)
    await trio.sleep_forever()
trio.run(main)
"""


def test_it_dies_with_its_parent(model_dir: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(model_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENV, text=True) as parent:
        assert parent.stdout is not None
        learner = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    deadline = time.monotonic() + 30
    while psutil.pid_exists(learner.pid) and learner.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "an orphan was left"
        time.sleep(0.05)


@pytest.mark.parametrize("sent", [None, {"settings": {"model": {"colour": "red"}}, "trained": None}])
async def test_a_bad_beginning(sent: dict[str, Any] | None) -> None:
    if sent is None:
        process = spawn("rl.learner_child", env=ENV)
        await process.frames.aclose()
        with trio.fail_after(30):
            assert await process.wait() == 0
    else:
        async with child(sent) as (_, first):
            assert first["error"]["type"] == "ValidationError"
            assert "colour" in first["error"]["message"]
