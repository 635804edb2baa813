"""Rollouts out of the pool into files, and from files into the pool: nothing in a file is believed."""

import builtins
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from node.commands.rollouts import import_file, write_pool
from node.config import Config
from node.config_sources import load, parse_flag
from node.datadir import DataDir, DataDirError
from node.errors import NodeError
from node.identity import Identity
from node.importing import import_rollouts, origin_of
from node.record import MetricsFile
from node.rollouts_file import MAX_LINE, read_rows, row_of, write_rows
from p2p.reasons import Reason
from rl.pool import SqlitePool
from rl.rollouts import Completion, RolloutGroup, ScoredGroup
from tests.node.records import record, scored_group
from verifiers.base import Task
from verifiers.sandbox import open_sandbox
from verifiers.stream import TaskStream


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of a node that has done seven rounds of questions from a file, with room for six groups of an origin."""
    questions = tmp_path / "sums.jsonl"
    questions.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(99)))
    mix = json.dumps([{"verifier": "exact", "config": {"path": str(questions)}}])
    flags = [f"node.data_dir={tmp_path / 'node'}", f"tasks.mix={mix}", "pool.per_peer=6", "admission.max_completion=50"]
    made = load([parse_flag(flag) for flag in flags], environ={}).config
    with DataDir.open(made.node.data_dir) as data:
        data.write_config(made)
        for number in range(1, 8):
            MetricsFile(data.metrics_path).append(record(number))
    return made


async def rows(config: Config) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Eight rows that may be learned from, as another node's export has them, and one of the held-out split."""

    def row(task: Task) -> dict[str, Any]:
        answer = str(task.answer)
        answers = (Completion(answer, True), Completion("no idea", False))
        # What the other node says of rewards is the opposite of the truth.
        return row_of(ScoredGroup(RolloutGroup(task, answers, 3), "12D3KooWother", 90, (0.0, 1.0), (-1.0, 1.0)))

    async with open_sandbox(config.verifiers, []) as sandbox:
        training = await TaskStream.open(sandbox, config.tasks.mix, 5)
        held_out = await TaskStream.open(sandbox, config.tasks.mix, 5, held_out=True)
        return [row(task) for task in await training.draw(8)], row((await held_out.draw(1))[0])


def write(path: Path, *lines: Mapping[str, Any] | str) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return path


async def test_what_is_imported_has_passed_all_that_a_peers_groups_have_to(config: Config, tmp_path: Path) -> None:
    [one, two, *more], held_out = await rows(config)
    path = write(
        tmp_path / "theirs.jsonl",
        one, two | {"added": "later"}, one, more[0] | {"prompt": "Another?"}, held_out,
        more[1] | {"verifier": "unheard_of"}, more[1] | {"version": "0"}, more[1] | {"index": 10**6},
        more[1] | {"completions": ["x" * 51, "1"]}, more[1] | {"completions": ["1"]},
        more[1] | {"completions": ["1", 2]},
        more[1] | {"finished": [True]}, "{", "[" * 100_000, "", "[1]", '"' + "x" * MAX_LINE + '"', more[2],
    )  # fmt: skip
    outcome = await import_rollouts(config, path, "import:theirs")
    assert (outcome.imported, outcome.informative, outcome.known, outcome.no_room) == (3, 3, 1, 0)
    assert outcome.refused == {
        Reason.WRONG_PROMPT: 2,
        Reason.HELD_OUT: 1,
        Reason.UNKNOWN_TASK: 2,
        Reason.TOO_LONG: 1,
        Reason.SCHEMA: 4,
        Reason.DECODE: 2,
        Reason.TOO_LARGE: 1,
    }
    kept = list(SqlitePool.read(DataDir(config.node.data_dir).pool_path))
    assert [(group.origin, group.round, group.rewards) for group in kept] == [("import:theirs", 8, (1.0, 0.0))] * 3
    assert kept[0].advantages[0] > 0 > kept[0].advantages[1]
    # Under another name they are the same groups; what did not pass does not pass now.
    again = await import_rollouts(config, path, "import:other")
    assert (again.imported, again.known) == (0, 4)
    assert again.refused == outcome.refused


async def test_no_more_is_imported_than_one_origin_has_room_for(config: Config, tmp_path: Path) -> None:
    good, _ = await rows(config)
    outcome = await import_rollouts(config, write(tmp_path / "x.jsonl", *good), "import:x")
    assert (outcome.imported, outcome.no_room) == (6, 2)


SPY = """
import json, sys
for line in sys.stdin:
    reply = {"prompt": "p", "answer": None}
    if json.loads(line)["op"] == "score":
        try:
            reply = {"reward": float(bool(open(KEY).read()))}
        except OSError:
            reply = {"reward": 0.0}
    print(json.dumps(reply), flush=True)
"""


async def test_whatever_scores_what_is_imported_does_not_see_the_nodes_key(tmp_path: Path) -> None:
    data, script = tmp_path / "node", tmp_path / "spy.py"
    script.write_text(SPY.replace("KEY", repr(str(data / "identity.key"))))
    command = json.dumps({"spy": {"argv": [sys.executable, str(script)]}})
    mix = json.dumps([{"verifier": "command", "config": {"name": "spy"}}])
    flags = [f"node.data_dir={data}", f"tasks.mix={mix}", f"verifiers.commands={command}"]
    config = load([parse_flag(flag) for flag in flags], environ={}).config
    async with open_sandbox(config.verifiers, [data]) as sandbox:
        [task] = await (await TaskStream.open(sandbox, config.tasks.mix, 5)).draw(1)
        if not sandbox.isolation.get("program files"):
            pytest.skip("this system does not let a process limit the files that a program sees")
    answers = (Completion("a", True), Completion("b", True))
    row = row_of(ScoredGroup(RolloutGroup(task, answers, 0), "other", 1, (0.0, 0.0), (0.0, 0.0)))
    assert (await import_rollouts(config, write(tmp_path / "x.jsonl", row), "import:x")).imported == 1
    [group] = SqlitePool.read(DataDir(data).pool_path)
    assert (data / "identity.key").is_file()
    assert group.rewards == (0.0, 0.0)


async def test_nothing_is_imported_while_a_node_runs(config: Config, tmp_path: Path) -> None:
    with DataDir.open(config.node.data_dir), pytest.raises(DataDirError, match="is in use by the node"):
        await import_rollouts(config, write(tmp_path / "x.jsonl", "{"), "import:x")


def test_the_origin_of_what_is_imported_is_no_peer_id() -> None:
    assert origin_of(Path("a/theirs.jsonl"), None) == "import:theirs"
    assert origin_of(Path("a/b c.jsonl"), "ours.2") == "import:ours.2"
    for path, name in ((Path("a/b c.jsonl"), None), (Path("x"), ""), (Path("x"), "x" * 65)):
        with pytest.raises(NodeError, match="give --name"):
            origin_of(path, name)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Path]:
    """A data directory with three groups, one of them the node's own, in a pool that is open."""
    with DataDir.open(tmp_path / "node") as data:
        own = Identity.load_or_create(data.identity_path).node_id
        with SqlitePool(data.pool_path, own) as opened:
            for number, origin in enumerate((own, "a", "b"), 1):
                group = scored_group("gcd", "q", (f"é{number}", "2"))
                opened.add([ScoredGroup(group.group, origin, number, group.rewards, group.advantages)])
            yield data.path


def test_a_pool_is_exported_while_the_node_runs(pool: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    for since, origin, expected in ((0, None, [1, 2, 3]), (2, None, [2, 3]), (0, "own", [1]), (0, "b", [3])):
        write_pool(pool, file, "jsonl", since, origin, force=True)
        found = [json.loads(line) for line in file.read_text().splitlines()]
        assert [row["round"] for row in found] == expected
        assert [row["completions"] for row in found] == [[f"é{number}", "2"] for number in expected]
        assert all("answer" not in row for row in found)
    with pytest.raises(NodeError, match="exists: give another file, or --force"):
        write_pool(pool, file, "jsonl", 0, None, force=False)
    groups = [group for group in read_rows(file) if not isinstance(group, Reason)]
    assert [group.completions[0].text for group in groups] == ["é3"], "and can be read again"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_cannot_be_exported_or_imported_says_what_to_do(pool: Path, tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=r"there is no directory .*nowhere: make it"):
        write_pool(pool, tmp_path / "nowhere" / "out.jsonl", "jsonl", 0, None, force=False)
    config = load([parse_flag(f"node.data_dir={pool}")], environ={})
    DataDir(pool).write_config(config.config)
    (tmp_path / "x").write_bytes(b"PAR1...")
    with pytest.raises(NodeError, match="is Parquet, and only JSON lines are read"):
        import_file(config, tmp_path / "x", None)


def test_parquet_has_the_same_columns(pool: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_pool(pool, tmp_path / "out.parquet", "parquet", 0, None, force=False)
    groups = list(SqlitePool.read(pool / "pool.sqlite"))
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist() == [row_of(group) for group in groups]


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **further: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **further)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(NodeError, match=r"pip install 'swarmnode\[parquet\]'"):
        write_rows([scored_group()], tmp_path / "out.parquet", "parquet")
    assert list(tmp_path.iterdir()) == []
