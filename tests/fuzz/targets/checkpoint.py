"""A checkpoint's manifest and state."""

import json

from node.datadir import DataDir
from node.status import _trained_model
from rl.checkpoint import MANIFEST, STATE, CheckpointStore
from tests.fuzz.scratch import cut, directory, joined

DATA = DataDir(directory())
STORE = CheckpointStore(DATA.checkpoints_path)


def seeds() -> list[bytes]:
    written = STORE.begin(7)
    (written / "adapter").write_bytes(b"weights")
    STORE.commit(7, written, {"cursor": {"gcd": 3}, "model": "tiny", "policy_step": 5, "seed": 1})
    path = DATA.checkpoints_path / "00000007"
    state = (path / STATE).read_bytes()
    return [joined([(path / MANIFEST).read_bytes(), state]), joined([json.dumps({"files": {}}).encode(), b"[1, 2]"])]


def run(data: bytes) -> None:
    path = DATA.checkpoints_path / "00000007"
    (path / "sub").mkdir(parents=True, exist_ok=True)
    (path / "adapter").write_bytes(b"weights")
    pieces = cut(data)
    (path / MANIFEST).write_bytes(next(pieces, b""))
    (path / STATE).write_bytes(next(pieces, b""))
    found = STORE.newest()
    assert found is None or isinstance(found.state, dict)
    assert bool(STORE.damaged) == (found is None)
    _trained_model(DATA, [7])
