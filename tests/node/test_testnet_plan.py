"""What a testnet starts its nodes with."""

import itertools
from pathlib import Path

import psutil
import pytest

from node.commands.flags import load_with_flags
from node.config import Config
from node.datadir import DataDir
from node.errors import ConfigError, NodeError
from node.record import MetricsFile
from node.testnet.plan import NodePlan, PlanError, Wishes, make_plans
from tests.node.records import record


@pytest.fixture(autouse=True)
def _nothing_else_configures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


_PASSED = ("--config", "--model", "--engine", "--data-dir")


def as_started(plan: NodePlan, again: bool = False) -> Config:
    """The configuration that a node comes to, started so."""
    words = plan.command(again)[4:]
    flags = {name: words[words.index(name) + 1] for name in _PASSED if name in words}
    return load_with_flags(
        Path(flags["--config"]) if "--config" in flags else None,
        [value for flag, value in itertools.pairwise(words) if flag == "--set"],
        model=flags["--model"],
        engine=flags.get("--engine"),
        data_dir=flags["--data-dir"],
    ).config


def test_each_node_knows_all_the_others_and_waits_for_them(tmp_path: Path) -> None:
    plans = make_plans(Wishes(nodes=3))
    configs = [as_started(plan) for plan in plans]
    assert [config.node.data_dir for config in configs] == [tmp_path / "testnet" / f"node-{n}" for n in (1, 2, 3)]
    assert [config.model.name for config in configs] == ["tiny"] * 3
    for plan, config in zip(plans, configs, strict=True):
        assert plan.address.startswith(f"{config.network.listen[0]}/p2p/12D3KooW")
        assert config.network.join == [other.address for other in plans if other is not plan]
        assert config.network.wait_for_peers == 2
        assert not any((config.network.mdns, config.network.dht, config.network.upnp))
    assert len({plan.address for plan in plans}) == 3
    assert as_started(plans[0], again=True).network.wait_for_peers == 0


def test_its_own_settings_make_way_for_the_operators(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        '[node]\nname = "me"\nthreads = 3\n[network]\nlisten = ["/ip4/0.0.0.0/tcp/4747"]\n'
    )
    plan, _ = make_plans(Wishes(nodes=2, configs=[Path("a.toml")], settings=["network.mdns=true"]))
    config = as_started(plan)
    assert (config.node.name, config.node.threads, config.network.mdns) == ("me", 3, True)
    assert config.network.listen[0].startswith("/ip4/127.0.0.1/"), "no testnet opens a port to the outside"


def test_a_configuration_a_node_makes_nodes_that_differ(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[model]\nname = "tiny"\n[sampling]\ngroup_size = 8\n')
    (tmp_path / "b.toml").write_text("[sampling]\ngroup_size = 5\n")
    plans = make_plans(Wishes(configs=[Path("a.toml"), Path("b.toml")], models=["tiny", "auto"], seed=7))
    configs = [as_started(plan) for plan in plans]
    assert [config.sampling.group_size for config in configs] == [8, 5]
    assert [config.model.name for config in configs] == ["tiny", "auto"]
    assert ["--seed 7" in " ".join(plan.command()) for plan in plans] == [True, False], "two with one seed draw alike"


def test_an_engine_that_is_asked_for_is_every_nodes() -> None:
    assert {as_started(plan).engine.kind for plan in make_plans(Wishes(nodes=2, engine="transformers"))} == {
        "transformers"
    }
    assert {as_started(plan).engine.kind for plan in make_plans(Wishes(nodes=2))} == {"auto"}


def test_engines_that_start_side_by_side_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()._replace(available=8 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)

    def cache(wishes: Wishes) -> set[float]:
        return {as_started(plan).engine.memory_gb for plan in make_plans(wishes)}

    assert cache(Wishes(nodes=2, engine="vllm")) == {2.0}
    assert cache(Wishes(nodes=4, models=["auto"])) == {1.0}
    assert cache(Wishes(nodes=2, engine="vllm", settings=["engine.memory_gb=3"])) == {3.0}
    assert cache(Wishes(nodes=2)) == {0.0}, "a tiny model is not vLLM's"


@pytest.mark.parametrize(
    ("wishes", "problem"),
    [
        (Wishes(nodes=3, configs=[Path("a.toml"), Path("a.toml")]), "--config is given 2 times for 3 nodes"),
        (Wishes(models=["tiny"] * 2, configs=[Path("a.toml")] * 3), "--model is given 2 times for 3 nodes"),
        (Wishes(configs=[Path("none.toml")]), "none.toml: cannot be read"),
        (Wishes(settings=["training.lr=much"]), "training.lr"),
        (Wishes(engine="fast"), "engine.kind"),
        (Wishes(directory=" "), "must name a directory"),
    ],
)
def test_a_mistake_is_said_once_and_leaves_nothing_behind(tmp_path: Path, wishes: Wishes, problem: str) -> None:
    (tmp_path / "a.toml").write_text("")
    with pytest.raises((PlanError, ConfigError), match=problem) as caught:
        make_plans(wishes)
    assert caught.value.exit_status == 2
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "testnet").exists()


def test_nodes_that_are_done_already_are_not_waited_for() -> None:
    first = make_plans(Wishes(nodes=3, rounds=2))
    assert not any(plan.resumes for plan in first)
    for number in (1, 2):
        MetricsFile(DataDir(first[0].data_dir).metrics_path).append(record(number))
    DataDir(first[0].data_dir).write_config(as_started(first[0]))
    plans = make_plans(Wishes(nodes=3, rounds=2))
    assert [plan.resumes for plan in plans] == [True, False, False]
    assert [plan.address.rpartition("/")[2] for plan in plans] == [plan.address.rpartition("/")[2] for plan in first]
    assert [as_started(plan).network.wait_for_peers for plan in plans] == [2, 1, 1]
    assert [as_started(plan).network.wait_for_peers for plan in make_plans(Wishes(nodes=3, rounds=3))] == [2, 2, 2]


def test_two_testnets_do_not_share_a_directory() -> None:
    plans = make_plans(Wishes(nodes=2))
    with DataDir.open(plans[1].data_dir), pytest.raises(NodeError, match=r"node-2 is in use"):
        make_plans(Wishes(nodes=2))
