"""A package from elsewhere, with a verifier that does what the answer tells it to."""

from pathlib import Path

import pytest

OBEDIENT = """
import os, socket, time
from verifiers.process import Channel
from verifiers.base import Task, VerifierError, canonical_json


class Obedient:
    name = "obedient"
    version = "3"

    def __init__(self, greeting="hello"):
        self.greeting = greeting

    def canonical(self, config):
        if set(config) - {"do"}:
            raise VerifierError("obedient takes one option, do")
        return canonical_json(config)

    def make(self, ref):
        order = ref.config.partition("!")[2].rstrip('"}')
        verb, _, number = order.removeprefix("do ").partition(" ")
        if (
            verb == "skip" and ref.index % int(number) == 2
            or verb == "first" and ref.index >= int(number)
            or verb == "late" and ref.index < int(number)
        ):
            raise VerifierError("not this one")
        act(order)
        return Task(ref, "obedient", f"{self.greeting} {ref.index}", "right")

    def score(self, task, answer):
        return act(answer) if answer.startswith(("do ", "eval ")) else float(answer == "right")


hoard = []


def act(order):
    verb, _, rest = order.removeprefix("do ").partition(" ")
    if verb == "hang":
        while True:
            pass
    if verb == "exit":
        os._exit(int(rest))
    if verb == "memory":
        return float(len(bytearray(2**36)))
    if verb == "hoard":
        hoard.append(bytearray(int(rest) * 2**20))
        return 1.0
    if verb == "silence":
        send = Channel.send
        Channel.send = lambda self, value: time.sleep(1000) if value[1] == "ok" else send(self, value)
        return 1.0
    if verb == "reply":
        send = Channel.send
        def once(self, value):
            Channel.send = send
            number, kind, reward, outcome = value
            send(self, [number + (rest == "to another"), kind, reward if rest == "to another" else rest, outcome])
        Channel.send = once
        return 1.0
    if verb == "raise":
        raise RuntimeError(rest)
    if verb == "sleep":
        time.sleep(float(rest))
        return 1.0
    if verb == "print":
        print("[1, 'ok', 1.0]" * 1000, flush=True)
        return 1.0
    if verb == "garbage":
        for number in range(3, 64):
            try:
                socket.socket(fileno=number).detach()
                os.write(number, b"\\xff" * 4096)
            except OSError:
                pass
        return 1.0
    if verb == "connect":
        with socket.create_connection(("127.0.0.1", int(rest)), timeout=2):
            return 1.0
    if verb == "environment":
        return float(any(rest in value for value in os.environ.values()))
    if verb == "write":
        with open(rest, "w") as file:
            file.write("x")
        return 1.0
    if verb == "take":
        time.sleep(float(rest))
        return 1.0
    if verb == "eval":
        eval(rest)
    return float(rest) if verb == "give" else 0.0
"""


@pytest.fixture
def obedient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the verifier, which is installed for as long as the test runs."""
    site = tmp_path / "site"
    information = site / "obedient-1.0.dist-info"
    information.mkdir(parents=True)
    (site / "obedient_package.py").write_text(OBEDIENT)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: obedient\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[swarmnode.verifiers]\nobedient = obedient_package:Obedient\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    return "obedient"
