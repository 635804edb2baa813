"""Tasks of the library: the same everywhere, scored right, and deaf to payloads."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verifiers.base import MAX_SEED, Task, TaskRef, UnknownTask, VerifierError
from verifiers.sandbox import Sandbox, open_sandbox
from verifiers.settings import VerifierSettings

PATIENT = VerifierSettings(answer_seconds=30)

PAPER: dict[str, dict[str, Any]] = {
    "base_conversion": {"max_base": 4, "min_value": 1, "max_value": 15},
    "basic_arithmetic": {"max_terms": 2, "max_digits": 1, "operators": ["+", "-", "*"]},
    "arc_1d": {"min_size": 10, "max_size": 10},
    "bf": {"difficulty": 1},
    "propositional_logic": {"max_vars": 2, "max_statements": 2},
    "fraction_simplification": {"max_value": 9, "max_factor": 5, "styles": ["plain"]},
    "decimal_arithmetic": {"min_num_decimal_places": 1, "max_num_decimal_places": 1, "max_terms": 2},
    "calendar_arithmetic": {"tasks": ["weekday_offset"], "offset_upper_bound": 7},
    "binary_matrix": {"max_n": 3},
}


async def made(sandbox: Sandbox, config: dict[str, Any], seed: int = 5, index: int = 0) -> Task:
    version, canonical = await sandbox.canonical("reasoning_gym", config)
    return await sandbox.make(TaskRef("reasoning_gym", version, canonical, seed, index))


@pytest.mark.parametrize("easier", [False, True])
async def test_the_nine_tasks_of_the_paper(easier: bool) -> None:
    async with open_sandbox(PATIENT, []) as sandbox:
        for name, options in PAPER.items():
            for index in range(3):
                task = await made(sandbox, {"dataset": name, **(options if easier else {})}, index=index)
                assert task.kind == name
                if task.answer is None:
                    assert name == "propositional_logic"
                    assert task.example is None
                    assert await sandbox.score(task, ["P", "no idea", ""]) == [0, 0, 0]
                    continue
                assert await sandbox.score(task, [f"<answer>{task.answer}</answer>", "no idea"]) == [1, 0]
                assert task.example is not None
                assert task.example.prompt != task.prompt
                again = task.__class__(task.ref, task.kind, task.example.prompt, task.example.answer)
                assert not again.held_out


async def test_propositional_logic_is_judged_by_its_scorer() -> None:
    async with open_sandbox(PATIENT, []) as sandbox:
        rewards = []
        for index in range(4):
            task = await made(sandbox, {"dataset": "propositional_logic"}, index=index)
            first = task.prompt.split("1. ")[1].split("\n")[0]
            rewards += await sandbox.score(task, [first, "(Z ∧ Y)"])
        assert rewards[0::2].count(1.0) >= 1
        assert rewards[1::2] == [0] * 4


_DIGESTS = """
import hashlib, json, sys, trio
from verifiers.base import MAX_SEED, TaskRef
from verifiers.sandbox import open_sandbox
from verifiers.settings import VerifierSettings

async def main():
    names, backwards = json.loads(sys.argv[1]), sys.argv[2] == "backwards"
    refs = [(name, seed, index) for name in names for seed, index in ((3, 0), (3, 1), (MAX_SEED, MAX_SEED))]
    digests = {}
    async with open_sandbox(VerifierSettings(answer_seconds=60), []) as sandbox:
        for name, seed, index in reversed(refs) if backwards else refs:
            version, config = await sandbox.canonical("reasoning_gym", {"dataset": name})
            task = await sandbox.make(TaskRef("reasoning_gym", version, config, seed, index))
            digests[f"{name} {seed} {index}"] = hashlib.sha256(repr(task).encode()).hexdigest()
    print(json.dumps(digests))

trio.run(main)
"""


@pytest.mark.slow
def test_every_data_set_makes_the_same_tasks_in_another_process() -> None:
    """In any order, under any hash seed of the node, in any working directory and time zone."""
    names = json.loads(_run("from verifiers.reasoning_gym import _names; import json; print(json.dumps(_names()))"))
    assert len(names) == 104
    one = _run(_DIGESTS, json.dumps(names), "forwards", PYTHONHASHSEED="1", TZ="Asia/Tokyo")
    other = _run(_DIGESTS, json.dumps(names), "backwards", PYTHONHASHSEED="2", TZ="America/Lima")
    assert json.loads(one) == json.loads(other)
    assert len(json.loads(one)) == 3 * len(names)


def _run(code: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment).stdout


async def test_a_known_task_stays_what_it_is() -> None:
    """Nodes of a swarm remake each other's tasks, so what a reference means may never change."""
    async with open_sandbox(PATIENT, []) as sandbox:
        task = await made(sandbox, {"dataset": "gcd"}, seed=MAX_SEED - 1, index=12)
        assert task.ref.version == "0.1.25"
        assert task.prompt == KNOWN_PROMPT
        assert task.answer == KNOWN_ANSWER


KNOWN_PROMPT = (
    "Find the Greatest Common Divisor (GCD) of these numbers: 702, 65. Give only the GCD as your final answer."
)
KNOWN_ANSWER = "13"


async def test_configurations_have_one_spelling() -> None:
    async with open_sandbox(PATIENT, []) as sandbox:

        async def canonical(**config: Any) -> str:
            return (await sandbox.canonical("reasoning_gym", config))[1]

        assert await canonical(dataset="gcd") == '{"dataset":"gcd"}'
        assert await canonical(max_value=1000, dataset="gcd") == '{"dataset":"gcd"}'
        assert await canonical(max_value=9, dataset="gcd") == '{"dataset":"gcd","max_value":9}'
        operators = await canonical(dataset="basic_arithmetic", operators=["+", "-", "*", "/"])
        assert operators == '{"dataset":"basic_arithmetic"}'
        assert await canonical(dataset="word_sorting", transformation="original") == '{"dataset":"word_sorting"}'
        assert "uppercase" in await canonical(dataset="word_sorting", transformation="uppercase")
        variables = await canonical(dataset="polynomial_multiplication", variables=["x", "y"])
        assert variables == '{"dataset":"polynomial_multiplication","variables":["x","y"]}'


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "dataset = NAME"),
    ({"dataset": "base_convertion"}, "did you mean 'base_conversion'"),
    ({"dataset": "gcd", "max_valu": 3}, "did you mean 'max_value'"),
    ({"dataset": "gcd", "max_value": "many"}, "gcd.max_value"),
    ({"dataset": "gcd", "max_value": -5}, "gcd"),
    ({"dataset": "gcd", "seed": 1}, "seed"),
    ({"dataset": "gcd", "size": 10}, "size"),
    ({"dataset": "codeio"}, "clock"),
    ({"dataset": "composite"}, "task mix"),
    ({"dataset": "spell_backward", "data_file": "/etc/passwd"}, "not allowed"),
    ({"dataset": "spell_backward", "data_file": "../../secret"}, "not allowed"),
    ({"dataset": "simple_integration", "symbols": ["__import__('os').mkdir('canary')"]}, "not allowed"),
    ({"dataset": "basic_arithmetic", "operators": ["+ open('canary','w') +"]}, "not allowed"),
]


async def test_bad_configurations_are_explained() -> None:
    async with open_sandbox(PATIENT, []) as sandbox:
        for config, message in BAD:
            with pytest.raises(VerifierError, match=message):
                await sandbox.canonical("reasoning_gym", config)


async def test_references_that_are_not_this_nodes_are_refused() -> None:
    async with open_sandbox(PATIENT, []) as sandbox:
        task = await made(sandbox, {"dataset": "gcd"})
        for change in ({"version": "0.1.24"}, {"seed": -1}, {"seed": MAX_SEED + 1}, {"index": -1}):
            with pytest.raises(UnknownTask):
                await sandbox.make(TaskRef(**({f: getattr(task.ref, f) for f in TaskRef.__slots__} | change)))
        for config in ('{"dataset": "gcd"}', '{"dataset":"gcd","max_value":1000}', "nonsense", "[1]", "[" * 100_000):
            with pytest.raises(VerifierError):
                await sandbox.make(TaskRef("reasoning_gym", task.ref.version, config, 1, 1))


@pytest.mark.slow
async def test_absurd_configurations_of_a_peer_are_only_refused() -> None:
    absurd = [
        {"dataset": "chain_sum", "min_terms": 10**8, "max_terms": 10**9},
        {"dataset": "spiral_matrix", "min_n": 10**5, "max_n": 10**5},
        {"dataset": "gcd", "max_value": 10**5000},
    ]
    async with open_sandbox(VerifierSettings(answer_seconds=1, memory_mb=512), []) as sandbox:
        task = await made(sandbox, {"dataset": "gcd"})
        for config in absurd:
            with pytest.raises(VerifierError):
                await made(sandbox, config)
        assert await sandbox.score(task, [task.answer or ""]) == [1]


async def test_answers_that_the_library_wrongly_accepts() -> None:
    wrong = {
        "puzzle24": "6*4*1*1",
        "game_of_life_halting": "perhaps",
        "coin_flip": "0",
        "complex_arithmetic": "nan",
    }
    async with open_sandbox(PATIENT, []) as sandbox:
        for dataset, answer in wrong.items():
            task = await made(sandbox, {"dataset": dataset})
            assert await sandbox.score(task, [answer, task.answer or ""]) == [0, 1], dataset
        task = await made(
            sandbox, {"dataset": "intermediate_integration", "problem_types": ["linear"], "problem_type_weights": [1.0]}
        )
        integrand = task.prompt.split("∫ ")[1].split(" dx")[0]
        assert await sandbox.score(task, [f"Integral({integrand}, x) + C", task.answer or ""]) == [0, 1]


_ACTS = [
    "__import__('os').mkdir({path!r})",
    "[[__import__('os').mkdir({path!r})]]",
    "['A', __import__('os').mkdir({path!r})]",
    "1 + __import__('os').mkdir({path!r})",
    "x**2 + __import__('os').mkdir({path!r}) + C",
    "__import__('os').system('mkdir {path}')",
    "exec('import os; os.mkdir({path!r})')",
    "(lambda: __import__('os').mkdir({path!r}))()",
    "[().__class__.__base__.__subclasses__()[-1], __import__('os').mkdir({path!r})]",
    "sympify(\"__import__('os').mkdir('{path}')\")",
    "{{\"a\": \"__import__('os').mkdir('{path}')\"}}",
    "$(mkdir {path})",
    "`mkdir {path}`",
    "cos\nsystem\n(S'mkdir {path}'\ntR.",
    "!!python/object/apply:os.mkdir [{path}]",
    "\\input{{|mkdir {path}}} $__import__('os').mkdir({path!r})$",
]


_NO_LANDLOCK = """
import landlockpy

def refuse(**_):
    raise landlockpy.UnsupportedError(95, "not supported")

landlockpy.Ruleset = refuse
"""


@pytest.mark.slow
async def test_no_data_set_runs_a_payload(obedient: str, tmp_path: Path) -> None:
    """Each payload makes a directory when evaluated, which a sandbox on a kernel without Landlock does not prevent."""
    (tmp_path / "site" / "sitecustomize.py").write_text(_NO_LANDLOCK)
    names = json.loads(_run("from verifiers.reasoning_gym import _names; import json; print(json.dumps(_names()))"))
    canary = tmp_path / "canary"
    payloads = [act.format(path=str(canary)) for act in _ACTS]
    async with open_sandbox(PATIENT, []) as sandbox:
        version, config = await sandbox.canonical(obedient, {})
        control = await sandbox.make(TaskRef(obedient, version, config, 0, 0))
        await sandbox.score(control, [f"eval {payloads[0]}"])
        assert canary.exists(), "a scorer that does evaluate shows that the canary sings"
        canary.rmdir()
        for name in names:
            task = await made(sandbox, {"dataset": name})
            wrapped = [f"<answer>{payload}</answer>" for payload in payloads]
            assert not any(await sandbox.score(task, wrapped)), name
            assert not canary.exists(), name
        for name in ("composite", "codeio"):
            refused = replace(task.ref, config=f'{{"dataset":"{name}"}}')
            with pytest.raises(VerifierError, match="cannot be used"):
                await made(sandbox, {"dataset": name})
            with pytest.raises(VerifierError, match="cannot be used"):
                await sandbox.make(refused)
            with pytest.raises(VerifierError, match="cannot be used"):
                await sandbox.score(replace(task, ref=refused), wrapped)
            assert not canary.exists(), name
        assert not any(sandbox.outcomes[outcome] for outcome in ("timeout", "crashed", "memory"))
