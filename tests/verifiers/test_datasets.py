"""Questions from a local file."""

import hashlib
import json
import os
import shutil
import signal
import tracemalloc
from pathlib import Path

import pytest

from verifiers.base import MAX_SEED, TaskRef, UnknownTask, VerifierError
from verifiers.datasets import Exact
from verifiers.math import Math
from verifiers.sandbox import open_sandbox
from verifiers.settings import VerifierSettings

CAPITALS = {f"capital of country {number}?": f"City  {number}" for number in range(7)}


def written(path: Path, pairs: dict[str, str]) -> Path:
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in pairs.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


async def test_nodes_with_the_same_file_share_its_tasks(tmp_path: Path) -> None:
    one, other = written(tmp_path / "capitals.jsonl", CAPITALS), tmp_path / "renamed.jsonl"
    shutil.copy(one, other)
    async with open_sandbox(VerifierSettings(), []) as first, open_sandbox(VerifierSettings(), []) as second:
        version, config = await first.canonical("exact", {"path": str(one)})
        assert json.loads(config) == {"sha256": hashlib.sha256(one.read_bytes()).hexdigest()}
        ref = TaskRef("exact", version, config, 9, 3)
        with pytest.raises(UnknownTask, match="no file"):
            await second.make(ref)
        assert await second.canonical("exact", {"path": str(other)}) == (version, config)
        here, there = await first.make(ref), await second.make(ref)
        assert (here.prompt, here.answer) == (there.prompt, there.answer)
        assert (here.kind, there.kind) == ("capitals", "renamed")
        assert here.example is not None
        assert here.example.prompt != here.prompt
        number = here.prompt.split()[-1].rstrip("?")
        assert await first.score(here, [f" cITY {number}\n", f"<answer>City {number}</answer>", "City"]) == [1, 1, 0]


async def test_a_replaced_worker_still_knows_the_file(tmp_path: Path) -> None:
    async with open_sandbox(VerifierSettings(workers=2), []) as sandbox:
        version, config = await sandbox.canonical("exact", {"path": str(written(tmp_path / "q.jsonl", CAPITALS))})
        refs = [TaskRef("exact", version, config, 1, index) for index in range(4)]
        before = [await sandbox.make(ref) for ref in refs]
        for pid in sandbox.pids:
            os.kill(pid, signal.SIGKILL)
        assert [await sandbox.make(ref) for ref in refs] == before


async def test_a_peer_cannot_name_a_path(tmp_path: Path) -> None:
    path = written(tmp_path / "q.jsonl", CAPITALS)
    async with open_sandbox(VerifierSettings(), []) as sandbox:
        for config in (json.dumps({"path": str(path)}), '{"sha256":"../../etc/passwd"}', "nonsense"):
            with pytest.raises(UnknownTask):
                await sandbox.make(TaskRef("exact", "1", config, 0, 0))


def test_each_pass_over_the_file_asks_every_question_once(tmp_path: Path) -> None:
    exact = Exact()
    config = exact.canonical({"path": str(written(tmp_path / "q.jsonl", CAPITALS))})
    passes = [
        [exact.make(TaskRef("exact", "1", config, 4, 7 * number + place)).prompt for place in range(7)]
        for number in range(3)
    ]
    assert all(sorted(asked) == sorted(CAPITALS) for asked in passes)
    assert passes[0] != passes[1]


def test_every_question_may_come_first(tmp_path: Path) -> None:
    for count in (1, 2, 7, 64, 65):
        pairs = {f"{number}?": str(number) for number in range(count)}
        exact = Exact()
        config = exact.canonical({"path": str(written(tmp_path / "q.jsonl", pairs))})
        first = {exact.make(TaskRef("exact", "1", config, seed, 0)).prompt for seed in range(20 * count)}
        assert first == set(pairs)


def test_a_peer_that_picks_seeds_and_indices_takes_no_memory(tmp_path: Path) -> None:
    exact = Exact()
    pairs = {f"{number}?": str(number) for number in range(50_000)}
    config = exact.canonical({"path": str(written(tmp_path / "q.jsonl", pairs))})
    tracemalloc.start()
    try:
        tasks = [exact.make(TaskRef("exact", "1", config, seed, MAX_SEED - seed)) for seed in range(50)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len({task.prompt for task in tasks}) > 40
    assert peak < 2**18


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "a", "answer": "b"}\n{"question": "a"', "q.jsonl, line 2: not JSON"),
        ('{"question": "a", "answer": "b"}\n\n{"question": "a"}', 'q.jsonl, line 3: "answer"'),
        ('{"question": " ", "answer": "b"}', 'q.jsonl, line 1: "question"'),
        ('{"question": "a", "answer": 3}', 'q.jsonl, line 1: "answer"'),
        ("[1]", "q.jsonl, line 1: not a JSON object"),
        ("\n", "q.jsonl has no questions"),
    ],
)
def test_bad_files_are_explained(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(content)
    with pytest.raises(VerifierError, match=message):
        Exact().canonical({"path": str(path)})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"path": "q.jsonl"}, "in full"),
        ({"path": "/no/such/file.jsonl"}, "cannot be read"),
        ({"path": "/tmp", "split": "train"}, "one option"),
        ({"sha256": "0" * 64}, "one option"),
    ],
)
def test_bad_options_are_explained(config: dict[str, str], message: str) -> None:
    with pytest.raises(VerifierError, match=message):
        Exact().canonical(config)


RIGHT = [
    ("1/2", "0.5"),
    ("1/2", "so it must be \\boxed{\\frac{1}{2}}"),
    ("12", "first \\boxed{7}, no, \\boxed{12}"),
    ("12", "The answer is 12."),
    ("x^2+2x+1", "(x+1)^2"),
    ("\\{1,2\\}", "$\\{2,1\\}$"),
    ("1,000", "1000"),
    ("\\sqrt{8}", "2\\sqrt{2}"),
]
WRONG = [
    ("12", "13"),
    ("12", "first \\boxed{12}, no, \\boxed{7}"),
    ("12", ""),
    ("0", ""),
    ("12", "__import__('os')"),
    ("1/2", "\\boxed{2}"),
    ("x^2", "x^3"),
    ("12", "\\boxed{"),
]


def test_math_compares_by_meaning(tmp_path: Path) -> None:
    math = Math()
    for pairs, expected in ((RIGHT, 1.0), (WRONG, 0.0)):
        for gold, answer in pairs:
            config = math.canonical({"path": str(written(tmp_path / "m.jsonl", {"q": gold}))})
            task = math.make(TaskRef("math", "1", config, 0, 0))
            assert math.score(task, answer) == expected, (gold, answer)


@pytest.mark.slow
async def test_math_in_the_sandbox_survives_a_tower_of_powers(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl", {"q": "1/2"})
    async with open_sandbox(VerifierSettings(answer_seconds=3, memory_mb=1024), []) as sandbox:
        version, config = await sandbox.canonical("math", {"path": str(path)})
        task = await sandbox.make(TaskRef("math", version, config, 0, 0))
        assert await sandbox.score(task, ["0.5", "9^9^9^9^9^9", "\\boxed{\\frac12}"]) == [1, 0, 1]
