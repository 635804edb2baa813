"""Takes each defence of docs/security.md out, and looks whether the test that is said to need it fails then.

`python -m tests.defences [WORD...]` works through `defences.toml`, or those of its entries that hold one of the words,
on a copy of the tree, one after another. It says of each whether the test noticed, and ends with status 1 if one did
not. It takes about half an hour, so it is not part of the suite: for those who change a defence or its test.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]

_PASSED, _FAILED = 0, 1
"""Exit statuses of pytest. Others mean that it could not run the test at all."""

_TEST_SECONDS = 60
"""A test that hangs without the defence has noticed too."""


@dataclass(frozen=True, slots=True)
class Defence:
    """`code`, once in `file`, is replaced by `without`; then `test` has to fail. `threat` begins a row of the table."""

    threat: str
    file: str
    code: str
    without: str
    test: str

    @property
    def text(self) -> str:
        """The file without the defence. Raises ValueError if the defence is not where it should be."""
        whole = (ROOT / self.file).read_text()
        if whole.count(self.code) != 1:
            raise ValueError(f"{self.file} has {whole.count(self.code)} times, and not once:\n{self.code}")
        return whole.replace(self.code, self.without)


def defences() -> list[Defence]:
    """All of `defences.toml`."""
    threats = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return [Defence(threat, **entry) for threat, entries in threats.items() for entry in entries]


@contextmanager
def _copy() -> Iterator[Path]:
    """A copy of the tree, and an environment beside it that imports the copy, whatever the `PYTHONPATH`."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-defences-") as place:
        tree, environment = Path(place) / "tree", Path(place) / "environment"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "shared"))
        venv.create(environment, symlinks=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        others = [path for path in sys.path if path.endswith("-packages")]
        (packages / "tree.pth").write_text("\n".join([str(tree), *others]))
        yield tree


def _run(tree: Path, tests: Sequence[str]) -> int:
    """Pytest's exit status. Without caches of bytecode: they tell files apart by size and second."""
    python = str(tree.with_name("environment") / "bin" / "python")
    command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--timeout={_TEST_SECONDS}", *tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with (tree / "pytest.log").open("w") as log:
        status = subprocess.run(command, cwd=tree, env=environment, stdout=log, stderr=log, check=False).returncode
    _end_all(python)
    return status


def _end_all(python: str) -> None:
    """End what a test has left because the defence that would have ended it was out."""
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [""])[0] == python:
            with suppress(psutil.Error):
                process.kill()


def _noticed(tree: Path, defence: Defence) -> str:
    """What became of the test without the defence."""
    file = tree / defence.file
    file.write_text(defence.text)
    try:
        status = _run(tree, [defence.test])
    finally:
        shutil.copy(ROOT / defence.file, file)
    return {_PASSED: "NOT NOTICED", _FAILED: "noticed"}.get(status, f"NOT RUN (pytest's status {status})")


def main(words: Sequence[str]) -> int:
    """Returns the exit status."""
    chosen = [each for each in defences() if not words or any(word in str(each) for word in words)]
    missed = 0
    with _copy() as tree:
        if _run(tree, sorted({each.test for each in chosen})) != _PASSED:
            print((tree / "pytest.log").read_text(), "\nthe tests fail with all defences in place", file=sys.stderr)
            return 1
        for each in chosen:
            result = _noticed(tree, each)
            missed += result != "noticed"
            print(f"{result}: {each.file}: {each.code.strip().splitlines()[0]} ({each.test})", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
