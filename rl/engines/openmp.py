"""The threads of the learner while they wait: they should neither sleep too soon nor keep a core from others.

PyTorch brings GNU's OpenMP. Its threads either spin, which starves whatever else runs, or sleep at once, which costs
a quarter of vLLM's speed on an idle machine. Intel's, which vLLM's build for CPUs depends on, gives way while it spins,
and stops after a millisecond: nearly as fast as the one alone and as the other in company (docs/LOG.md).
"""

import importlib.metadata
from collections.abc import Mapping

PACKAGE, LIBRARY = "intel-openmp", "libiomp5.so"

SPIN_MILLISECONDS = 1


def waiting(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process that computes. What is set there already stands."""
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & environment.keys():
        return {}
    library = _library()
    if library is None or "LD_PRELOAD" in environment:
        return {"OMP_WAIT_POLICY": "PASSIVE"}
    return {"LD_PRELOAD": library, "KMP_BLOCKTIME": str(SPIN_MILLISECONDS)}


def _library() -> str | None:
    """Where Intel's OpenMP lies, if it is installed in this environment."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (file.locate() for file in files if file.name == LIBRARY)
    return next((str(path) for path in found if path.is_file()), None)  # type: ignore[attr-defined]
