"""What `swarmnode doctor` says of the verifiers' confinement, on systems that offer it and on one that does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DOCTOR = """
import errno, json, sys
from dataclasses import asdict
from pathlib import Path
from node.config import Config
from node.doctor_sandbox import check_sandbox
from verifiers import seccomp
from verifiers.isolation import give_up_privileges

if sys.argv[1] == "nothing":
    seccomp._NUMBERS["landlock_create_ruleset"] = (444, 444)
    give_up_privileges()
    assert seccomp.restrict([
        seccomp.Refused("unshare"),
        seccomp.Refused("landlock_create_ruleset", error=errno.ENOSYS),
        seccomp.Refused("prctl", "among", 0, (22,)),
    ])
config = Config.model_validate({
    "node": {"data_dir": sys.argv[2]},
    "tasks": {"mix": [{"verifier": "command", "config": {"name": "sums"}}]},
    "verifiers": {"commands": {
        "sums": {"argv": [sys.executable, sys.argv[3]]},
        "mine": {"argv": [sys.executable, sys.argv[3]], "needs": ["everything"]},
    }},
})
print(json.dumps([asdict(check) for check in check_sandbox(config)]))
"""

PROGRAM = """
import sys
for line in sys.stdin:
    print('{"prompt": "%s", "answer": "a"}' % hash(line), flush=True)
"""


def lines(tmp_path: Path, offers: str) -> dict[str, tuple[str, str]]:
    """State and text of each line, by what it is about."""
    script = tmp_path / "sums.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DOCTOR, offers, str(tmp_path / "node"), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = {}
    for check in json.loads(done.stdout):
        name, _, text = check["text"].partition(": ")
        found[name if check["name"] == "sandbox" else check["name"]] = (check["state"], text)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="confinement is the Linux kernel's")
def test_what_a_system_lacks_is_a_note_that_says_what_to_do(tmp_path: Path) -> None:
    found = lines(tmp_path, "nothing")
    assert found["tasks"][0] == "ok"
    for name, advice in (
        ("network", "user.max_user_namespaces"),
        ("secrets", "Landlock"),
        ("processes", "seccomp"),
        ("program network", "user.max_user_namespaces"),
        ("program files", "Landlock"),
        ("program disk", "user.max_user_namespaces"),
        ("program calls", "seccomp"),
    ):
        assert found[name][0] == "note", name
        assert advice in found[name][1], name
    assert found["memory"][0] == found["program memory"][0] == "ok"


def test_a_program_that_is_confined_in_nothing_is_named(tmp_path: Path) -> None:
    state, text = lines(tmp_path, "everything")["program mine"]
    assert state == "note"
    assert "[verifiers.commands.mine] needs everything" in text
