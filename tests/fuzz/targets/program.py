"""What an external verifier answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.scratch import directory
from verifiers.base import VerifierError
from verifiers.codec import pack
from verifiers.command import Program, _made, _scored
from verifiers.settings import CommandSettings, VerifierSettings

DIRECTORY = directory()


def seeds() -> list[bytes]:
    return [
        b'{"prompt": "6 + 7?", "answer": "13"}',
        b'{"prompt": "gr\\u00f6\\u00dfer?", "answer": null}',
        b'{"reward": 1}',
        b'{"reward": 0.25, "why": ["x"]}',
        b'{"error": "no such task"}',
    ]


class _Answering(Program):
    """One that has answered."""

    def __init__(self, place: Path) -> None:
        super().__init__("x", CommandSettings(argv=["/bin/x"]), VerifierSettings(), place, [])
        place.with_suffix(".log").touch()

    def told(self, line: bytes, read: Callable[[dict[str, Any]], Any]) -> Any:
        return self._taken(line, self._decode(line), read)


def run(data: bytes) -> None:
    program = _Answering(DIRECTORY / "log")
    for read in (_made, _scored):
        try:
            value = program.told(data, read)
        except VerifierError as error:
            assert len(str(error)) < 5000
            str(error).encode()
            continue
        pack(value)
        assert isinstance(value, tuple) or 0 <= value <= 1
