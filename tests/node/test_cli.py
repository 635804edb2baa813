"""The command line as it is typed."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from node.commands.flags import load_run_with_flags
from node.config_sources import load, parse_flag
from node.datadir import DataDir
from node.evaluations import EvaluationsFile
from node.identity import Identity
from node.record import MetricsFile
from rl.checkpoint import CheckpointReader, CheckpointStore
from rl.pool import SqlitePool
from tests.node.records import evaluated, record, scored_group

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "start",
    "init",
    "config",
    "status",
    "id",
    "peers",
    "watch",
    "pause",
    "resume",
    "checkpoint",
    "stop",
    "testnet",
    "eval",
    "chat",
    "export",
    "compare",
    "rollouts",
    "doctor",
    "version",
)


def swarmnode(
    *arguments: str, cwd: Path, text: str = "", path: tuple[Path, ...] = (ROOT,), **environ: str
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SWARMNODE_", "HF_"))}
    return subprocess.run(
        [sys.executable, "-m", "node.cli", *arguments],
        cwd=cwd,
        env={**clean, "PYTHONPATH": os.pathsep.join(map(str, path)), **environ},
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """What a node that did 60 rounds of two kinds of task leaves."""
    path = tmp_path / "node"
    config = load(
        [parse_flag(f"node.data_dir={path}"), parse_flag("node.name=my node")],
        environ={"SWARMNODE_MODEL__NAME": "tiny"},
    ).config
    with DataDir.open(path) as data:
        data.write_config(config)
        Identity.load_or_create(data.identity_path)
        for number in range(1, 61):
            MetricsFile(data.metrics_path).append(record(number, reward_local=0.0 if number <= 10 else 0.5))
        with SqlitePool(data.pool_path, "me") as pool:
            pool.add([scored_group("lcm", "b", rewards=(0.0, 0.0))])
        store = CheckpointStore(data.checkpoints_path)
        for number, sampled in ((20, 0.9), (40, 0.75), (60, 0.5)):
            EvaluationsFile(data.evaluations_path).append(evaluated(number, sampled))
        for number in (40, 50):
            directory = store.begin(number)
            (directory / "policy").write_text("")
            store.commit(number, directory, {"model": "tiny"})
    return path


def test_without_a_command_it_says_what_it_can_do(tmp_path: Path) -> None:
    for arguments in ((), ("--help",)):
        result = swarmnode(*arguments, cwd=tmp_path)
        assert all(command in result.stdout for command in COMMANDS)
    for asked in ("version", "--version"):
        assert swarmnode(asked, cwd=tmp_path).stdout.strip() == version("swarmnode")


def test_the_shell_completes_commands(tmp_path: Path) -> None:
    result = swarmnode(cwd=tmp_path, _SWARMNODE_COMPLETE="complete_bash", COMP_WORDS="swarmnode st", COMP_CWORD="1")
    assert (result.stdout.split(), result.stderr) == (["start", "status", "stop"], "")


@pytest.mark.parametrize("command", ["chat", "eval", "status"])
def test_a_mistyped_data_directory_is_not_the_base_model(command: str, tmp_path: Path) -> None:
    result = swarmnode(command, "--data-dir", str(tmp_path / "typo"), cwd=tmp_path, text="hi\n")
    assert (result.returncode, result.stdout) == (1, "")
    assert f"no node has run in {tmp_path / 'typo'}" in result.stderr
    assert not (tmp_path / "typo").exists()


def test_each_mistake_in_a_configuration_is_an_error_line(tmp_path: Path) -> None:
    result = swarmnode("config", "--set", "training.lr=x", "--set", "sharing.local=x", cwd=tmp_path)
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert len(lines) > 1
    assert all(line.startswith("error: ") for line in lines)


def test_status_names_the_model_that_auto_found(data_dir: Path, tmp_path: Path) -> None:
    config = load([parse_flag(f"node.data_dir={data_dir}"), parse_flag("model.name=auto")], environ={}).config
    DataDir(data_dir).write_config(config)
    status = json.loads(swarmnode("status", "--json", "--data-dir", str(data_dir), cwd=tmp_path).stdout)
    assert status["model"] == "tiny"
    # Of round 20, which was better, there is no checkpoint.
    assert (status["evaluation"]["round"], status["best"]) == (60, 40)


def test_help_does_not_wait_for_the_learning_libraries() -> None:
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom node.cli import app\n"
        "for command in ('start', 'eval', 'chat', 'export', 'doctor'):\n"
        "    assert CliRunner().invoke(app, [command, '--help']).exit_code == 0\n"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub', 'reasoning_gym', 'trio')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("flags", [["--json"], ["--check"]])
def test_a_look_at_a_node_takes_neither_an_event_loop_nor_an_http_server(flags: list[str], data_dir: Path) -> None:
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom node.cli import app\n"
        "CliRunner().invoke(app, ['status', '--data-dir', *sys.argv[1:]])\n"
        "assert 'node.datadir' in sys.modules\n"
        "print([name for name in ('trio', 'starlette', 'structlog', 'rich', 'torch', 'libp2p', 'numpy')"
        " if name in sys.modules])"
    )
    command = [sys.executable, "-c", script, str(data_dir), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_status_tells_how_far_a_node_is(data_dir: Path, tmp_path: Path) -> None:
    status = json.loads(swarmnode("status", "--json", "--data-dir", str(data_dir), cwd=tmp_path).stdout)
    assert status["node_id"] == Identity.load(data_dir / "identity.key").node_id
    assert (status["name"], status["model"], status["pid"]) == ("my node", "tiny", None)
    assert status["rounds"] == 60
    assert status["last"] == record(60, reward_local=0.5).model_dump()
    assert status["reward_recent"] == pytest.approx(0.5)
    assert status["checkpoints"] == [40, 50]
    text = swarmnode("status", cwd=tmp_path, SWARMNODE_NODE__DATA_DIR=str(data_dir), SWARMNODE_MODEL__NAME="tiny")
    assert "not running" in text.stdout
    assert "after round 40, 50" in text.stdout
    with DataDir.open(data_dir):
        text = swarmnode("status", "--data-dir", str(data_dir), cwd=tmp_path)
        assert f"running, process {os.getpid()}" in text.stdout


def test_status_tells_how_each_kind_of_its_own_tasks_goes(data_dir: Path, tmp_path: Path) -> None:
    me = Identity.load(data_dir / "identity.key").node_id
    late = scored_group("gcd", "c", rewards=(1.0, 0.5))
    with SqlitePool(data_dir / "pool.sqlite", me) as pool:
        pool.add([replace(late, origin=me, round=60), replace(late, origin="somebody else", round=60)])
        pool.add([replace(scored_group("gcd", "d"), origin=me, round=1)])
    status = json.loads(swarmnode("status", "--json", "--data-dir", str(data_dir), cwd=tmp_path).stdout)
    assert status["kinds"] == [{"kind": "gcd", "groups": 1, "reward": 0.75}]
    text = swarmnode("status", "--data-dir", str(data_dir), cwd=tmp_path).stdout
    assert "75.0%" in text


def test_looking_leaves_a_checkpoint_alone_that_is_being_written(data_dir: Path, tmp_path: Path) -> None:
    unfinished = data_dir / "checkpoints" / ".writing-00000060"
    unfinished.mkdir()
    assert swarmnode("status", "--data-dir", str(data_dir), cwd=tmp_path).returncode == 0
    newest = CheckpointReader(data_dir / "checkpoints").newest()
    assert newest is not None
    assert newest.round == 50
    assert unfinished.is_dir()


@pytest.mark.parametrize("content", [None, b"", b"nonsense " * 1000])
def test_status_copes_with_a_pool_that_is_none_and_leaves_it_alone(
    data_dir: Path, tmp_path: Path, content: bytes | None
) -> None:
    pool = data_dir / "pool.sqlite"
    for path in data_dir.glob("pool.sqlite*"):
        path.unlink()
    if content is not None:
        pool.write_bytes(content)
    before = sorted(data_dir.iterdir())
    done = swarmnode("status", "--data-dir", str(data_dir), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "after round 40, 50" in done.stdout
    complaints = [line for line in done.stdout.splitlines() if str(pool) in line]
    assert len(complaints) == (0 if content is None else 1)
    assert sorted(data_dir.iterdir()) == before
    assert (pool.read_bytes() if pool.exists() else None) == content


def test_something_else_in_the_place_of_a_file_is_one_line(data_dir: Path, tmp_path: Path) -> None:
    (data_dir / "metrics.jsonl").unlink()
    (data_dir / "metrics.jsonl").mkdir()
    done = swarmnode("status", "--data-dir", str(data_dir), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"error: {data_dir / 'metrics.jsonl'}: Is a directory; move away what is there, or use another path"
    ]


def test_a_node_whose_checkpoints_cannot_be_written_says_where(data_dir: Path, tmp_path: Path) -> None:
    (data_dir / "checkpoints").rename(data_dir / "elsewhere")
    (data_dir / "checkpoints").write_text("")
    where = ("--data-dir", str(data_dir), "--set", 'tasks.mix=[{"config": {"dataset": "gcd"}}]')
    done = swarmnode("start", "--silo", "--model", "tiny", "--no-tty", *where, cwd=tmp_path)
    assert done.returncode == 1
    assert str(data_dir / "checkpoints") in done.stderr
    assert "Traceback" not in done.stderr


def test_status_of_a_node_that_never_was(tmp_path: Path) -> None:
    result = swarmnode("status", "--data-dir", str(tmp_path / "none"), cwd=tmp_path)
    assert result.returncode == 1
    assert "no node has run in" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "none").exists(), "looking makes nothing"


def test_a_second_node_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "node"
    with DataDir.open(path):
        result = swarmnode("start", "--silo", "--model", "tiny", "--data-dir", str(path), cwd=tmp_path)
    assert result.returncode == 1
    assert f"is in use by the node with process id {os.getpid()}" in result.stderr
    assert "Traceback" not in result.stderr


def test_start_takes_addresses_and_says_which_cannot_be_used(tmp_path: Path) -> None:
    where = ("--data-dir", str(tmp_path / "node"), "--model", "tiny")
    joined = ("--join", "/ip4/192.0.2.1/tcp/4747", "--join", "192.0.2.1:4747", "--listen", "/ip4/127.0.0.1/tcp/0")
    result = swarmnode("start", *where, *joined, "--swarm", "My Swarm", cwd=tmp_path)
    assert result.returncode == 2
    assert "(flag --join): '192.0.2.1:4747' is not an address" in result.stderr
    assert "(flag --swarm)" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "node").exists()


def test_peers_and_id_before_the_first_start(tmp_path: Path) -> None:
    none = swarmnode("peers", "--data-dir", str(tmp_path / "none"), cwd=tmp_path)
    assert none.returncode == 1
    assert "no node has run in" in none.stderr
    made = swarmnode("id", "--data-dir", str(tmp_path / "new"), cwd=tmp_path)
    assert made.stdout.splitlines()[0] == Identity.load(tmp_path / "new" / "identity.key").node_id


def test_the_data_directory_may_be_named_by_set(data_dir: Path, tmp_path: Path) -> None:
    loaded = load_run_with_flags(None, ["node.data_dir=/nowhere", f"node.data_dir={data_dir}"])
    assert (loaded.config.node.name, loaded.config.node.data_dir) == ("my node", data_dir)
    both = load_run_with_flags(None, ["node.data_dir=/nowhere"], data_dir=data_dir)
    assert (both.config.node.name, both.config.node.data_dir) == ("my node", data_dir), "the flag of its own wins"


def test_export_refuses_before_it_works(data_dir: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    result = swarmnode("export", "--data-dir", str(data_dir), "--out", str(taken), cwd=tmp_path)
    assert result.returncode == 1
    assert "is not an empty directory" in result.stderr
    result = swarmnode(
        "export", "--data-dir", str(data_dir), "--out", str(tmp_path / "out"), "--push", "me/x", cwd=tmp_path,
        HF_HOME=str(tmp_path / "hf"),
    )  # fmt: skip
    assert result.returncode == 1
    assert "HF_TOKEN" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["status", "config"])
def test_an_empty_data_directory_is_not_the_working_directory(command: str, tmp_path: Path) -> None:
    result = swarmnode(command, "--data-dir", "", cwd=tmp_path)
    assert result.returncode == 2
    assert "must name a directory" in result.stderr
    assert "Traceback" not in result.stderr


def test_another_package_called_verifiers_is_recognised(tmp_path: Path) -> None:
    other = tmp_path / "site"
    (other / "verifiers").mkdir(parents=True)
    (other / "verifiers" / "__init__.py").write_text("")
    result = swarmnode("doctor", cwd=tmp_path, path=(other, ROOT))
    assert result.returncode == 1
    assert "pip uninstall verifiers" in result.stderr
    assert "Traceback" not in result.stderr
