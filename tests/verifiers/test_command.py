"""Tasks from a program, in the conversation that docs/verifiers.md describes."""

import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import trio

from verifiers.base import TaskRef, UnknownTask, VerifierError
from verifiers.sandbox import Sandbox, open_sandbox
from verifiers.settings import CommandSettings, VerifierSettings

DOCUMENT = Path(__file__).parents[2] / "docs" / "verifiers.md"

UNRULY = """
import json, os, sys, time
print("a warning", file=sys.stderr)
for line in sys.stdin:
    request = json.loads(line)
    order = request.get("answer", request["config"].get("do", ""))
    reply = {"reward": float(order == "right")} if request["op"] == "score" else {"prompt": "p", "answer": None}
    if order == "hang": time.sleep(1000)
    if order == "exit": sys.exit(1)
    if order == "prose": print("thinking...", flush=True); continue
    if order == "list": print("[1]", flush=True); continue
    if order == "twice": print(json.dumps(reply))
    if order == "endless": sys.stdout.write("x" * 2**21)
    if order == "reward": reply = {"reward": 2}
    if order == "nothing": reply = {}
    if order == "nan": reply = {"reward": float("nan")}
    if order == "error": reply = {"error": "no such level"}
    if order == "token": reply = {"reward": float("HF_TOKEN" in os.environ)}
    print(json.dumps(reply), flush=True)
"""


@asynccontextmanager
async def running(tmp_path: Path, program: str) -> AsyncIterator[Sandbox]:
    script = tmp_path / "program.py"
    script.write_text(program)
    command = CommandSettings(argv=[sys.executable, str(script)], version="4")
    async with open_sandbox(VerifierSettings(answer_seconds=1, commands={"mine": command}), []) as sandbox:
        yield sandbox


async def test_the_program_of_the_documentation(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(import json.*?)```", DOCUMENT.read_text(), re.DOTALL)
    async with running(tmp_path, program) as sandbox:
        version, config = await sandbox.canonical("command", {"name": "mine", "largest": 20})
        assert (version, config) == ("4", '{"largest":20,"name":"mine"}')
        task = await sandbox.make(TaskRef("command", version, config, 2**63 - 1, 5))
        a, b = map(int, re.findall(r"\d+", task.prompt))
        assert (task.kind, task.answer) == ("mine", str(a + b))
        assert await sandbox.score(task, [f"<answer>{a + b}</answer>", "-1", str(a + b)]) == [1, 0, 1]
        with pytest.raises(VerifierError, match="says: "):
            await sandbox.make(TaskRef("command", version, '{"largest":"many","name":"mine"}', 0, 0))
    async with running(tmp_path, program) as sandbox:
        assert await sandbox.make(task.ref) == task


async def test_answers_that_upset_the_program_score_zero(tmp_path: Path) -> None:
    async with running(tmp_path, UNRULY) as sandbox:
        task = await sandbox.make(TaskRef("command", "4", '{"name":"mine"}', 0, 0))
        assert task.answer is None
        assert await sandbox.score(task, ["right", "exit", "right", "hang", "wrong", "right"]) == [1, 0, 1, 0, 0, 1]
        assert sandbox.outcomes == {"scored": 4, "crashed": 1, "timeout": 1}


@pytest.mark.parametrize("order", ["prose", "list", "twice", "endless", "reward", "nothing", "nan"])
async def test_nonsense_is_an_error_that_names_the_program(tmp_path: Path, order: str) -> None:
    async with running(tmp_path, UNRULY) as sandbox:
        task = await sandbox.make(TaskRef("command", "4", '{"name":"mine"}', 0, 0))
        with pytest.raises(VerifierError, match=r"\[verifiers.commands.mine\].*a warning"):
            await sandbox.score(task, [order, "right"])
        assert await sandbox.score(task, ["right"]) == [1]


@pytest.mark.parametrize("order", ["exit", "hang", "error"])
async def test_a_task_the_program_cannot_make_is_an_error(tmp_path: Path, order: str) -> None:
    async with running(tmp_path, UNRULY) as sandbox:
        await sandbox.make(TaskRef("command", "4", '{"name":"mine"}', 0, 0))
        with pytest.raises(VerifierError, match=r"commands\.mine"):
            await sandbox.make(TaskRef("command", "4", f'{{"do":"{order}","name":"mine"}}', 0, 0))


async def test_only_programs_of_this_nodes_settings_run(tmp_path: Path) -> None:
    async with running(tmp_path, UNRULY) as sandbox:
        with pytest.raises(UnknownTask, match="did you mean 'mine'"):
            await sandbox.canonical("command", {"name": "mien"})
        with pytest.raises(VerifierError, match="name = NAME"):
            await sandbox.canonical("command", {"argv": ["touch", "canary"]})
        for ref in (
            TaskRef("command", "4", '{"name":"/bin/sh"}', 0, 0),
            TaskRef("command", "3", '{"name":"mine"}', 0, 0),
            TaskRef("command", "4", '{"name": "mine"}', 0, 0),
        ):
            with pytest.raises(VerifierError):
                await sandbox.make(ref)


async def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    command = CommandSettings(argv=[str(tmp_path / "missing")])
    async with open_sandbox(VerifierSettings(commands={"mine": command}), []) as sandbox:
        with pytest.raises(VerifierError, match=r"commands.mine\] argv.*missing"):
            await sandbox.make(TaskRef("command", "1", '{"name":"mine"}', 0, 0))


async def test_a_cancelled_question_does_not_answer_the_next(tmp_path: Path) -> None:
    async with running(tmp_path, UNRULY) as sandbox:
        task = await sandbox.make(TaskRef("command", "4", '{"name":"mine"}', 0, 0))
        with trio.move_on_after(0.2):
            await sandbox.score(task, ["hang"])
        assert await sandbox.score(task, ["wrong", "right"]) == [0, 1]


NODE = """
import sys, trio
from verifiers.base import TaskRef
from verifiers.sandbox import open_sandbox
from verifiers.settings import CommandSettings, VerifierSettings

async def main():
    command = CommandSettings(argv=[sys.executable, *sys.argv[2:]], needs=[sys.argv[1]])
    async with open_sandbox(VerifierSettings(answer_seconds=600, commands={"mine": command}), []) as sandbox:
        await sandbox.make(TaskRef("command", "1", '{"do":"pid","name":"mine"}', 0, 0))

trio.run(main)
"""

BUSY = """
import os, sys, time
sys.stdin.readline()
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a program ends when it has answered")
@pytest.mark.parametrize("confined", [True, False])
async def test_a_program_in_the_middle_of_a_request_dies_with_a_node_that_is_killed(
    tmp_path: Path, confined: bool
) -> None:
    told = tmp_path / "pid"
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    need = f"write:{tmp_path}" if confined else "everything"
    node = subprocess.Popen([sys.executable, "-c", NODE, need, str(script), str(told)])
    try:
        with trio.fail_after(60):
            while not told.exists():
                await trio.sleep(0.05)
        below = psutil.Process(node.pid).children(recursive=True)
        programs = [process for process in below if str(script) in process.cmdline()]
        assert len(programs) == (2 if confined else 1)
    finally:
        node.kill()
        node.wait()
    _, left = psutil.wait_procs(programs, timeout=30)
    for process in left:
        process.kill()
    assert not left


async def test_the_program_gets_no_secrets_and_ends_with_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretive")
    before = set(psutil.Process().children())
    async with running(tmp_path, UNRULY) as sandbox:
        task = await sandbox.make(TaskRef("command", "4", '{"name":"mine"}', 0, 0))
        assert await sandbox.score(task, ["token"]) == [0]
        assert len(set(psutil.Process().children()) - before) == 2
    assert set(psutil.Process().children()) <= before
