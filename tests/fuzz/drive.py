"""`python -m tests.fuzz.drive`: give the targets what libFuzzer makes up, by way of atheris, and count.

It ends with status 1 if there was an input that raised, took longer than `_SLOW` seconds or more memory than `_MEMORY`.
README.md in this folder says more.
"""

import argparse
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.fuzz.loading import Target, load, names
from tests.fuzz.mutating import mutated

_SLOW, _MEMORY = 10, 2048
"""Seconds for one input, and MiB for the whole process: torch alone takes some hundred."""

_WATCHED = ["node", "p2p", "rl", "tests.fuzz", "verifiers", "json", "msgpack", "starlette", "tomllib"]
"""Packages whose branches guide the search."""

_FLIPS = 0.4
"""Share of the inputs that libFuzzer changes itself, byte by byte."""

_LINES = 60


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"some of {', '.join(names())}; all if none is named")
    parser.add_argument("--seconds", type=int, default=10, help="for each target")
    parser.add_argument("--corpus", type=Path, default=Path("build/fuzz"), help="what was interesting is kept here")
    parser.add_argument("--input", type=Path, help="run the one target named on this file alone, without atheris")
    parser.add_argument("--here", action="store_true", help="fuzz the one target named in this process")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.targets) - set(names()):
        parser.error(f"no target is called {', '.join(sorted(unknown))}")
    logging.disable(logging.ERROR)
    if asked.input is not None:
        (name,) = asked.targets
        load(name).run(asked.input.read_bytes())
        return 0
    if asked.here:
        (name,) = asked.targets
        return _fuzz(name, asked.corpus / name, asked.seconds)
    results = [_apart(name, asked.corpus, asked.seconds) for name in asked.targets or names()]
    print(f"{'all':<16} {sum(count for count, _ in results):>10,} inputs")
    return int(any(failed for _, failed in results))


def _apart(name: str, corpus: Path, seconds: int) -> tuple[int, bool]:
    """Fuzz a target in a process of its own. Returns how many inputs it had, and whether one was too much for it."""
    command = [sys.executable, "-m", "tests.fuzz.drive", name, "--here", f"--seconds={seconds}", f"--corpus={corpus}"]
    done = subprocess.run(command, capture_output=True, check=False)
    said = done.stderr.decode(errors="replace")
    count = sum(map(int, re.findall(r"stat::number_of_executed_units:\s*(\d+)", said)))
    print(f"{name:<16} {count:>10,} inputs  {'FAILED' if done.returncode else 'none escaped'}", flush=True)
    if done.returncode:
        output = done.stdout.decode(errors="replace") + said
        print("\n".join(line[:400] for line in output.splitlines()[-_LINES:]), flush=True)
    return count, done.returncode != 0


def _fuzz(name: str, corpus: Path, seconds: int) -> int:
    import atheris

    with atheris.instrument_imports(include=_WATCHED):
        target = load(name)

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < _FLIPS:
            changed: bytes = atheris.Mutate(data, longest)
            return changed
        return mutated(data, random)[:longest]

    _plant(target, corpus)
    options = {
        "max_total_time": seconds,
        "max_len": target.longest,
        "timeout": _SLOW,
        "rss_limit_mb": _MEMORY,
        "artifact_prefix": corpus.parent / f"{name}-found-",
        "print_final_stats": 1,
        "verbosity": 0,
    }
    arguments = [sys.argv[0], *(f"-{option}={value}" for option, value in options.items()), str(corpus)]
    atheris.Setup(arguments, target.run, custom_mutator=mutate)
    atheris.Fuzz()
    return 0


def _plant(target: Target, corpus: Path) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number:03d}").write_bytes(seed)


if __name__ == "__main__":
    raise SystemExit(main())
