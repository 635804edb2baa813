"""Inputs that once got past a reader: each is to end in the error that the reader's documentation names."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl.checkpoint import MANIFEST, STATE, CheckpointStore, _fingerprint
from tests.fuzz.loading import load
from tests.fuzz.scratch import cut, joined
from tests.node.records import record
from verifiers.codec import pack


def talk(*values: Any) -> bytes:
    return joined([pack(value) for value in values])


def deep(depth: int) -> bytes:
    """Lists inside one another, which msgpack reads and nothing can show."""
    return b"\x91" * depth + b"\xc0"


def line(**changes: str) -> bytes:
    """A line of the record with values of any spelling."""
    spelled = {key: json.dumps(value) for key, value in record(1).model_dump().items()} | changes
    return ("{" + ", ".join(f'"{key}": {value}' for key, value in spelled.items()) + "}\n").encode()


SILENT = [{"id": number, "ok": False, "error": {"type": "ModelError", "message": "?"}} for number in (1, 2, 3)]
HELLO, LOADED, READY = ["hello", {}], [1, "ok", None], {"ready": {"model": "tiny"}}
PEM = """-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2sCBCIEIJK+S6fQu5II2nzA90JM+/i/14Ue8btTtGo3XszXMWfC
-----END PRIVATE KEY-----
"""
MANY_DIGITS = "1" * 400

FOUND: dict[str, tuple[str, bytes]] = {
    "a query that is no UTF-8, where nothing is": ("http", b"GET /nothing?\xff\nhost: localhost\n"),
    "a key of an unknown kind": ("identity", PEM.encode()),
    "a hello of three": ("sandbox", talk(["hello", {}, 1])),
    "an answer without a value": ("sandbox", talk(HELLO, LOADED, [2, "ok"])),
    "an answer of two values": ("sandbox", talk(HELLO, LOADED, [2, "ok", 1, 2])),
    "a deep hello": ("sandbox", joined([b"\x92" + deep(1000) + b"\x80"])),
    "a deep reply": ("sandbox", joined([pack(HELLO), pack(LOADED), b"\x92\x02" + deep(1000)])),
    "a deep error": ("sandbox", joined([pack(HELLO), pack(LOADED), b"\x94\x02\xa5error\xa1x" + deep(1000)])),
    "an endless error": ("sandbox", talk(HELLO, LOADED, [2, "error", "VerifierError", "x" * 50_000])),
    "a learner's frame that is no map": ("learner", talk(1)),
    "a learner that is not ready": ("learner", talk({"x": 1})),
    "an error of a learner without its type": ("learner", talk({"error": {"message": "?"}})),
    "an error of a learner that is a number": ("learner", talk({"error": 1.5})),
    "progress of nothing": ("learner", talk(READY, {"id": 1, "progress": []})),
    "text that is a number": ("learner", talk(READY, *SILENT, {"id": 4, "text": 1})),
    "no result": ("learner", talk(READY, {"id": 1, "ok": True})),
    "another result": ("learner", talk(READY, {"id": 1, "ok": True, "result": [7]})),
    "no error": ("learner", talk(READY, {"id": 1, "ok": False})),
    "neither": ("learner", talk(READY, {"id": 1})),
    "a deep policy.json": ("policy_files", joined([b"[" * 20_000])),
    "half a character in a question": ("questions", b'{"question": "6 + 7?", "answer": "\\ud800"}'),
    "half a character from a program": ("program", b'{"prompt": "6 + 7?", "answer": "\\ud800"}'),
    "half a character in its error": ("program", b'{"error": "\\ud800"}'),
    "a round at the end of time": ("record", line(time="Infinity")),
    "an endless reward": ("record", line(reward_local="-Infinity")),
    "a loss of many digits": ("record", line(loss=MANY_DIGITS)),
    "a round of many digits": ("record", line(round=MANY_DIGITS)),
    "a file of the first day": (
        "reputation",
        b'{"version": 1, "saved": -1.7e308, "peers": {"a": {"score": -5.0, "at": -1e308, "until": -1e308, "bans": 2}}}',
    ),
}


@pytest.mark.parametrize("name", list(FOUND))
def test_it_does_not_escape_again(name: str) -> None:
    target, data = FOUND[name]
    load(target).run(data)


@pytest.mark.parametrize("change", ['"step": -1', f'"gate": [{MANY_DIGITS}]'])
def test_a_state_that_no_policy_had_is_no_policy(change: str) -> None:
    target = load("policy_files")
    state, *files = cut(target.seeds()[0])
    # The last of two keys of one name counts.
    target.run(joined([state.rstrip(b"}") + f", {change}}}".encode(), *files]))


def test_an_optimiser_that_ends_within_a_number_is_none() -> None:
    target = load("policy_files")
    *others, _ = cut(target.seeds()[0])
    target.run(joined([*others, b"\x80\x02M\x01"]))


def test_a_checkpoint_of_no_round_is_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.commit(1, store.begin(1), {})
    path = tmp_path / "00000001"
    (path / STATE).write_text('{"round": Infinity}')
    (path / MANIFEST).write_text(json.dumps({"files": {STATE: _fingerprint(path / STATE)}}))
    assert store.newest() is None
    assert store.damaged


def test_what_is_said_of_a_damaged_checkpoint_is_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    written = store.begin(7)
    store.commit(7, written, {"model": "tiny"})
    manifest = tmp_path / "00000007" / MANIFEST
    changed = json.loads(manifest.read_bytes())
    changed["files"]["\ud800"] = {"size": 1, "sha256": ""}
    manifest.write_text(json.dumps(changed))
    assert store.newest() is None
    assert b"ud800" in caplog.text.encode()
