"""A testnet from its command line: nodes of two kinds that learn from each other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from node.record import MetricsFile
from p2p.contribution import Contribution, Told

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ROUNDS = 30

# Half of the tiny model's tasks, as in its recipe, so that the nodes have some kinds in common and some not.
FEW_TASKS = """
[sampling]
group_size = 5
[[tasks.mix]]
config = { dataset = "gcd", max_value = 30 }
[[tasks.mix]]
config = { dataset = "count_bits", max_n = 63 }
[[tasks.mix]]
config = { dataset = "chain_sum", min_terms = 2, max_terms = 2, max_digits = 1 }
[[tasks.mix]]
config = { dataset = "spell_backward", min_word_len = 3, max_word_len = 5 }
"""


def test_nodes_of_two_kinds_train_on_each_others_groups_and_refuse_nothing(tmp_path: Path) -> None:
    (tmp_path / "all.toml").write_text("[sampling]\ngroup_size = 8\n")
    (tmp_path / "few.toml").write_text(FEW_TASKS)
    configs = [word for name in ("all", "few", "all", "few") for word in ("--config", f"{name}.toml")]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "node.cli", "testnet", "--nodes", "4", "--model", "tiny", "--json", "--no-tty"),
            *("--rounds", str(ROUNDS), "--set", "storage.min_free_mb=0", *configs),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: list[Told] = []
    for number, row in enumerate(json.loads(done.stdout), 1):
        records = list(MetricsFile(tmp_path / "testnet" / f"node-{number}" / "metrics.jsonl").read())
        assert [record.round for record in records] == list(range(1, ROUNDS + 1))
        assert sum(record.external_groups > 0 for record in records) >= 25
        assert all(record.rejected == {} for record in records)
        assert row["name"] == f"node-{number}"
        assert row["external_groups"] == sum(record.external_groups for record in records)
        assert (row["state"], row["status"], row["rejected"]) == ("done", 0, {})
        kept = Contribution(tmp_path / "testnet" / f"node-{number}" / "contribution.json", "")
        kept.load()
        told.append(kept.told())
    # What was used in the last rounds was not told any more.
    assert sum(one.trained for one in told) >= 25
    assert all(one.trained_by == 3 and one.trained <= one.admitted <= 3 * one.sent for one in told)
