"""eval, chat and export on the data directory of a node that really trained."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from node.datadir import DataDir
from verifiers.base import is_held_out

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

MIX = '[{"config": {"dataset": "gcd", "max_value": 30}}, {"config": {"dataset": "count_bits", "max_n": 63}}]'


def swarmnode(
    *arguments: str, cwd: Path, text: str = "", status: int = 0, **environ: str
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SWARMNODE_", "HF_"))}
    done = subprocess.run(
        [sys.executable, "-m", "node.cli", *arguments],
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(ROOT), **environ},
        input=text,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == status, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    return done


def assert_no_path_of_this_machine(out: Path) -> None:
    for path in out.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        for local in (ROOT, Path.home(), Path(tempfile.gettempdir())):
            assert f"{local}/".encode() not in data, f"{local} in {path.name}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of a node with an adapter that did two rounds."""
    path = tmp_path_factory.mktemp("trained")
    small = (
        "--set",
        "lora.rank=4",
        "--set",
        "sharing.alone=4",
        "--set",
        "storage.min_free_mb=0",
        "--set",
        f"tasks.mix={MIX}",
    )
    start = ("start", "--silo", "--rounds", "2", "--model", "tiny", "--data-dir", str(path / "node"))
    swarmnode(*start, *small, cwd=path)
    return path / "node"


def test_eval_measures_both_models_on_each_kind_while_a_node_holds_the_directory(trained: Path, tmp_path: Path) -> None:
    with DataDir.open(trained):
        done = swarmnode("eval", "--json", "--per-task", "3", "--data-dir", str(trained), cwd=tmp_path)
    result = json.loads(done.stdout)
    assert (result["round"], result["model"]) == (2, "tiny")
    assert [(kind["kind"], kind["tasks"]) for kind in result["kinds"]] == [("gcd", 3), ("count_bits", 3)]
    for kind in (*result["kinds"], result["overall"]):
        for model in (kind["base"], kind["policy"]):
            assert 0 <= model["greedy"]["mean"] <= 1
            assert 0 <= model["sampled"]["mean"] <= 1
    assert json.loads((trained / "evaluation.json").read_text()) == result


@pytest.fixture
def few(tmp_path: Path) -> str:
    """A mix entry of three questions, none of which is held out."""
    asked = [f"{n} + 1?" for n in range(30) if not is_held_out(f"{n} + 1?")][:3]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in asked))
    return json.dumps({"verifier": "exact", "config": {"path": str(tmp_path / "few.jsonl")}})


def test_eval_needs_a_kind_with_held_out_questions(tmp_path: Path, few: str) -> None:
    arguments = ("--model", "tiny", "--data-dir", str(tmp_path / "none"), "--set", f"tasks.mix=[{few}]")
    done = swarmnode("eval", *arguments, cwd=tmp_path, status=1)
    assert "no kind of task has a held-out question (few)" in done.stderr


def test_without_a_checkpoint_only_the_base_model_is_measured(tmp_path: Path, few: str) -> None:
    mix = ("--set", f"tasks.mix=[{few}, {MIX[1:]}")
    where = ("--model", "tiny", "--data-dir", str(tmp_path / "none"))
    done = swarmnode("eval", "--per-task", "2", *where, *mix, cwd=tmp_path)
    assert f"nothing trained in {tmp_path / 'none'} yet: this is the base model" in done.stderr
    assert "base greedy" in done.stdout
    assert "policy" not in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("few"))
    assert line.split() == ["few", "0", "none", "held", "out"]
    assert not (tmp_path / "none").exists()


def held_out(path: Path, text: str) -> str:
    """A mix entry of one held-out question that begins with `text`."""
    question = next(q for q in (f"{text} {n}?" for n in range(1000)) if is_held_out(q))
    path.write_text(json.dumps({"question": question, "answer": "1"}) + "\n")
    return json.dumps({"verifier": "exact", "config": {"path": str(path)}})


def test_a_task_that_does_not_fit_the_model_counts_0_and_the_others_keep_their_place(tmp_path: Path) -> None:
    mix = f"[{held_out(tmp_path / 'long.jsonl', 'a ' * 5000)}, {held_out(tmp_path / 'short.jsonl', '1 + 1')}]"
    arguments = ("--model", "tiny", "--data-dir", str(tmp_path / "none"), "--set", f"tasks.mix={mix}")
    done = swarmnode("eval", "--json", *arguments, cwd=tmp_path)
    result = json.loads(done.stdout)
    assert [(kind["kind"], kind["tasks"]) for kind in result["kinds"]] == [("long", 1), ("short", 1)]
    assert result["kinds"][0]["base"]["sampled"]["mean"] == 0
    assert result["overall"]["tasks"] == 2


def test_eval_prints_a_result_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "node" / "evaluation.json").mkdir(parents=True)
    where = ("--model", "tiny", "--data-dir", str(tmp_path / "node"))
    mix = ("--set", f"tasks.mix=[{held_out(tmp_path / 'short.jsonl', '1 + 1')}]")
    done = swarmnode("eval", *where, *mix, cwd=tmp_path)
    assert "base greedy" in done.stdout
    assert "warning: the result could not be kept" in done.stderr
    assert str(tmp_path / "node" / "evaluation.json") in done.stderr


def test_ctrl_c_ends_an_evaluation_with_status_130_and_no_traceback(tmp_path: Path) -> None:
    arguments = ("eval", "--model", "tiny", "--data-dir", str(tmp_path / "none"), "--set", f"tasks.mix={MIX}")
    with subprocess.Popen(
        [sys.executable, "-m", "node.cli", *arguments],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        seen = ""
        for line in process.stderr:
            seen += line
            if line.startswith("base model"):
                break
        process.send_signal(signal.SIGINT)
        seen += process.stderr.read()
        assert process.wait(60) == 130, seen
    assert "Traceback" not in seen


def test_chat_answers_bytes_that_are_no_text(trained: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "node.cli", "chat", "--data-dir", str(trained), "--max-new-tokens", "4"]
    done = subprocess.run(
        [*command, "--system", b"\xff"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:strict"},
        input=b"2 \xff 2\n2 + 2\n",
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") == 2


def test_chat_answers_each_line_of_a_pipe(trained: Path, tmp_path: Path) -> None:
    arguments = ("chat", "--data-dir", str(trained), "--temperature", "0", "--max-new-tokens", "8")
    done = swarmnode(*arguments, cwd=tmp_path, text="2 + 2\n/base\n/reset\n2 + 2\n/nonsense\n\n")
    answers = done.stdout.splitlines()
    assert len(answers) == 2
    assert all(len(answer) <= 8 for answer in answers)
    assert "the base model" in done.stderr
    assert "there is no command /nonsense" in done.stderr


def test_chat_says_when_nothing_is_trained_yet(tmp_path: Path) -> None:
    (tmp_path / "node" / "checkpoints").mkdir(parents=True)
    where = ("--data-dir", str(tmp_path / "node"), "--set", "model.name=tiny")
    done = swarmnode("chat", *where, "--max-new-tokens", "2", cwd=tmp_path, text="hi\n")
    assert f"nothing trained in {tmp_path / 'node'} yet: this is the base model" in done.stderr
    assert done.stdout


def test_export_writes_a_model_that_transformers_loads_and_a_card(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    swarmnode("export", "--data-dir", str(trained), "--out", str(out), cwd=tmp_path)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.num_parameters() > 0
    assert len(tokenizer) <= model.config.vocab_size
    card = (out / "README.md").read_text()
    assert card.startswith("---\n")
    for expected in ("trained from `tiny` for 2 rounds", 'gcd {"max_value": 30}', "| 1 to 1 |", "Held-out accuracy"):
        assert expected in card
    assert_no_path_of_this_machine(out)
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


def test_export_writes_an_adapter_and_says_when_the_hub_does_not_take_it(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "adapter"
    arguments = ("export", "--adapter", "--push", "me/model", "--data-dir", str(trained), "--out", str(out))
    # Nothing listens on port 9: the hub is out of reach. An engine that could not be opened is not needed.
    hub = {"HF_TOKEN": "hf_none", "HF_ENDPOINT": "http://127.0.0.1:9"}
    engine = {"SWARMNODE_ENGINE__KIND": "vllm", "SWARMNODE_ENGINE__ARGS": '{"unheard_of": 1}'}
    done = swarmnode(*arguments, cwd=tmp_path, status=1, **hub, **engine)
    assert (out / "adapter_config.json").is_file()
    assert (out / "adapter_model.safetensors").is_file()
    assert "library_name: peft" in (out / "README.md").read_text()
    assert_no_path_of_this_machine(out)
    assert "me/model did not take it" in done.stderr
    assert "hf_none" not in done.stderr


def test_doctor_finds_that_a_node_can_run(trained: Path, tmp_path: Path) -> None:
    small = ("--set", "storage.min_free_mb=0", "--set", f"tasks.mix={MIX}")
    done = swarmnode("doctor", "--json", "--model", "tiny", "--data-dir", str(trained), *small, cwd=tmp_path)
    states = {check["name"]: check["state"] for check in json.loads(done.stdout)}
    assert "fail" not in states.values()
    assert {
        "python",
        "packages",
        "verifiers",
        "hardware",
        "data",
        "disk",
        "identity",
        "model",
        "engine",
        "sandbox",
        "pool",
        "network",
        "port",
        "reach",
        "mdns",
    } <= states.keys()
    limits = {check["text"].partition(":")[0] for check in json.loads(done.stdout) if check["name"] == "sandbox"}
    assert {"network", "memory"} <= limits


def test_doctor_finds_what_keeps_a_node_from_running(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bad = ("--data-dir", str(tmp_path / "file" / "node"), "--set", 'tasks.mix=[{"config": {"dataset": "nonsense"}}]')
    done = swarmnode("doctor", "--model", str(tmp_path / "no-model"), *bad, cwd=tmp_path, status=1)
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("fail")]
    assert failed == ["data", "model", "tasks"]
