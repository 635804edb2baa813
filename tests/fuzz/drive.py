"""`python -m tests.fuzz.drive TARGET`: give a target what libFuzzer makes up, by way of atheris, or one input of a file.

It ends with a status other than 0 at the first input that raises, takes longer than `_SLOW` seconds or more memory
than `_MEMORY`. README.md in this folder says more.
"""

import argparse
import logging
import sys
from pathlib import Path
from random import Random

from tests.fuzz.loading import Target, load, names
from tests.fuzz.mutating import mutated

_SLOW, _MEMORY = 10, 2048
"""Seconds for one input, and MiB for the whole process: torch alone takes some hundred."""

_WATCHED = ["node", "p2p", "rl", "tests.fuzz", "verifiers", "json", "msgpack", "starlette", "tomllib"]
"""Packages whose branches guide the search."""


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=names())
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--runs", type=int, default=-1, help="inputs at most; -1 is no limit")
    parser.add_argument("--corpus", type=Path, default=Path("build/fuzz"), help="what was interesting is kept here")
    parser.add_argument("--input", type=Path, help="run the target on this file alone, without atheris")
    asked = parser.parse_args()
    logging.disable(logging.ERROR)
    if asked.input is not None:
        load(asked.target).run(asked.input.read_bytes())
        return 0
    return _fuzz(asked.target, asked.corpus / asked.target, asked.seconds, asked.runs)


def _fuzz(name: str, corpus: Path, seconds: int, runs: int) -> int:
    import atheris

    with atheris.instrument_imports(include=_WATCHED):
        target = load(name)

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.4:
            changed: bytes = atheris.Mutate(data, longest)
            return changed
        return mutated(data, random)[:longest]

    _plant(target, corpus)
    found = corpus.parent / f"{name}-found-"
    atheris.Setup(
        [
            sys.argv[0],
            f"-max_total_time={seconds}",
            f"-runs={runs}",
            f"-max_len={target.longest}",
            f"-timeout={_SLOW}",
            f"-rss_limit_mb={_MEMORY}",
            f"-artifact_prefix={found}",
            "-print_final_stats=1",
            "-verbosity=0",
            "-len_control=10",
            str(corpus),
        ],
        target.run,
        custom_mutator=mutate,
    )
    atheris.Fuzz()
    return 0


def _plant(target: Target, corpus: Path) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number:03d}").write_bytes(seed)


if __name__ == "__main__":
    raise SystemExit(main())
