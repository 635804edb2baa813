"""How the learner's threads wait follows what is installed, and the user's own choice stands."""

from pathlib import Path

import pytest

from rl.engines import openmp


def test_without_intels_library_threads_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "PACKAGE", "no-such-package")
    assert openmp.waiting({}) == {"OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_the_user_sets_stands(name: str) -> None:
    assert openmp.waiting({name: "1"}) == {}


def test_another_preloaded_library_is_not_replaced() -> None:
    assert "LD_PRELOAD" not in openmp.waiting({"LD_PRELOAD": "/lib/other.so"})


@pytest.mark.vllm
def test_the_build_for_cpus_brings_the_library() -> None:
    added = openmp.waiting({})
    if "LD_PRELOAD" not in added:
        pytest.skip("this build of vLLM is not the one for CPUs")
    assert Path(added["LD_PRELOAD"]).is_file()
