"""The figures of compared runs come from the records alone, and unfinished or foreign runs are told apart."""

import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from bench import language, testnet
from bench.compared import agreement, compare_runs, read_scores, write_json
from bench.driving import Stop, go_on
from bench.runs import Case, RunError, merged, place_of, rates, read_run, sharing_of, summarise
from node.record import MetricsFile, Record


def a_record(number: int, reward: float, *, time: float, external: int = 0, **more: float | None) -> Record:
    values: dict[str, object] = {
        "round": number,
        "time": time,
        "policy_step": number,
        "local_groups": 4,
        "external_groups": external,
        "reward_local": reward,
        "reward_external": None,
        "informative_fraction": 0.5,
        "tokens_generated": 100,
        "seconds_generate": 1.0,
        "seconds_score": 0.1,
        "seconds_update": 0.5,
        "tokens_trained": 30,
        "loss": None,
        "clip_fraction": None,
        "entropy": None,
        "grad_norm": None,
        "engine_logprob_gap": None,
        "peers": 1,
        "batches_sent": 1,
        "batches_received": 1,
        "rejected": {},
    }
    return Record.model_validate({**values, **more})


def a_case(out: Path, configuration: str = "4/4", seed: int = 1, nodes: int = 2) -> Case:
    directory = place_of(out, configuration, seed)
    return Case(configuration, seed, directory, nodes, ("tiny",), sharing_of(configuration))


def with_records(case: Case, node: int, records: list[Record]) -> None:
    data = case.data(node)
    data.path.mkdir(parents=True, exist_ok=True)
    for record in records:
        MetricsFile(data.metrics_path).append(record)


def twice(case: Case, rounds: int, reward: float = 0.5) -> Case:
    """The case with so many rounds of both nodes."""
    for node in (1, 2):
        with_records(case, node, [a_record(n, reward, time=n, external=1) for n in range(1, rounds + 1)])
    return case


def test_figures_are_sums_over_rounds_of_means_over_nodes(tmp_path: Path) -> None:
    case = a_case(tmp_path)
    first = a_record(1, 0.2, time=1, external=2, gate_refused=3)
    one = [first, a_record(2, 0.6, time=2, external=3, gate_threshold=-4.5)]
    with_records(case, 1, one)
    two = [a_record(n, 0.1 * n, time=1.5 * n, external=1) for n in (1, 2, 3)]
    with_records(case, 2, two)
    run = read_run(case)
    assert run.rounds == 2
    summary = summarise(run, 2)
    assert summary.curve == pytest.approx([0.15, 0.4])
    assert summary.cumulative == pytest.approx(0.55)
    assert summary.final == pytest.approx(0.4)
    assert summary.worst == pytest.approx(0.3)
    assert (summary.generated_groups, summary.external_groups) == (16, 7)
    assert (summary.tokens_generated, summary.tokens_trained, summary.refused) == (400, 120, 3)
    assert summary.threshold == -4.5
    assert summary.informative == pytest.approx(2 + 7 / 4)
    # The first node ended at 2 s; the other did its second round at 3 s.
    assert summary.lag == 1
    with pytest.raises(ValueError, match="has 2 rounds of every node, not 3"):
        summarise(run, 3)


def test_runs_are_compared_over_the_rounds_that_all_have_done(tmp_path: Path) -> None:
    runs = [read_run(twice(a_case(tmp_path, name), rounds)) for name, rounds in (("8/0", 3), ("4/4", 5))]
    assert [summary.cumulative for summary in compare_runs(runs)] == pytest.approx([1.5, 1.5])
    assert compare_runs([*runs, read_run(a_case(tmp_path, "default"))]) == []


def scripted(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Every testnet is this script from now on."""
    monkeypatch.setattr(Case, "command", lambda case, rounds: [sys.executable, "-c", script])


def test_a_finished_run_is_not_started_again_and_more_rounds_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, "import time; print('started'); time.sleep(0.1)")
    case = a_case(tmp_path)
    with Stop() as stop, pytest.raises(RunError, match=r"4/4 seed 1 failed \(status 0\)[^$]*started"):
        go_on(case, 2, stop, print)
    twice(case, 2)
    (case.directory / "testnet.log").unlink()
    with Stop() as stop:
        run = go_on(case, 2, stop, print)
    assert run.rounds == 2
    assert run.seconds > 0.1
    assert not (case.directory / "testnet.log").exists()
    with Stop() as stop, pytest.raises(RunError, match="failed"):
        go_on(case, 3, stop, print)


def test_a_failing_testnet_is_reported_with_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "raise SystemExit('error: no such model')")
    with Stop() as stop, pytest.raises(RunError, match="no such model"):
        go_on(a_case(tmp_path), 2, stop, print)


def test_a_signal_ends_the_testnet_and_leaves_the_run_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_us = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    scripted(monkeypatch, told_us)
    said: list[str] = []
    with Stop() as stop:
        run = go_on(a_case(tmp_path), 2, stop, said.append)
        assert stop.count == 1
        again = go_on(a_case(tmp_path), 2, stop, said.append)
    assert run.rounds == again.rounds == 0
    assert len(said) == 1


def test_a_directory_of_another_run_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "")
    case = twice(a_case(tmp_path), 2)
    with Stop() as stop:
        with pytest.raises(RunError, match="holds something else"):
            go_on(case, 2, stop, print)
        other = a_case(tmp_path / "new")
        with pytest.raises(RunError, match="failed"):
            go_on(other, 2, stop, print)
        with pytest.raises(RunError, match="was begun with other settings: go on with the same"):
            go_on(replace(other, settings={"training": {"lr": 1.0}}), 2, stop, print)


def test_names_of_configurations_are_settings() -> None:
    assert sharing_of("default") == {}
    assert sharing_of("8/0") == {"sharing": {"silo": True, "alone": 8}, "training": {"decay_after": 50}}
    uniform = sharing_of("2/6")
    assert (uniform["sharing"]["local"], uniform["sharing"]["external"]) == (2, 6)
    assert uniform["sharing"]["selection"] == "uniform"
    assert uniform["sharing"]["per_peer"] == 6
    assert uniform["training"] == {"gate": False, "decay_after": 50}
    assert merged({"a": {"b": 1, "c": [1]}}, {"a": {"c": [2]}}) == {"a": {"b": 1, "c": [2]}}
    for name in ("4", "0/8", "4/4/4", "x/y", "best"):
        with pytest.raises(RunError, match="is no configuration"):
            sharing_of(name)


def test_learning_rates_are_for_all_or_for_one() -> None:
    assert rates(["default=1e-3", "2e-4"], ["8/0", "default"], 1.0) == {"8/0": 2e-4, "default": 1e-3}
    assert rates([], ["8/0"], 1.0) == {"8/0": 1.0}
    with pytest.raises(RunError, match="'6/2' is not among"):
        rates(["6/2=1e-3"], ["8/0"], 1.0)
    with pytest.raises(RunError, match="give a RATE"):
        rates(["8/0=fast"], ["8/0"], 1.0)


def test_the_order_is_set_beside_the_simulations(tmp_path: Path) -> None:
    file = tmp_path / "simulation.json"
    file.write_text(json.dumps({"8/0": [1.0, 2.0], "4/4": [2.0, 2.5], "default": [4.0], "6/2": [1]}))
    ours = {"8/0": [10.0], "4/4": [11.0], "default": [12.0]}
    assert agreement(ours, read_scores(file)) == (True, "the order agrees with the simulation: 8/0 < 4/4 < default")
    agrees, words = agreement({**ours, "4/4": [9.0]}, read_scores(file))
    assert not agrees
    assert "2 of 3 pairs agree" in words
    with pytest.raises(RunError, match="nothing to compare"):
        agreement({"8/0": [1.0]}, read_scores(file))
    file.write_text('{"8/0": 3}')
    with pytest.raises(RunError, match="does not hold"):
        read_scores(file)
    with pytest.raises(RunError, match="cannot be read"):
        read_scores(tmp_path / "none.json")


def test_what_was_written_can_be_compared_with(tmp_path: Path) -> None:
    summaries = compare_runs([read_run(twice(a_case(tmp_path, "4/4", seed), 2)) for seed in (1, 2)])
    write_json(summaries, {("4/4", 1): [(0.1, 0.2)]}, tmp_path / "out.json")
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["cumulative"] == {"4/4": [1.0, 1.0]}
    assert written["runs"][0]["held_out"] == [{"base": 0.1, "policy": 0.2}]
    assert "held_out" not in written["runs"][1]


def a_world(path: Path, nodes: int) -> Path:
    for number in range(1, nodes + 1):
        (path / "models" / f"node-{number}").mkdir(parents=True)
    (path / "tasks").mkdir()
    (path / "tasks" / "sums.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    return path


def test_a_world_gives_each_node_its_model_and_all_the_same_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, "")
    world = a_world(tmp_path / "world", 2)
    arguments = testnet.parse(["--nodes", "2", "--world", str(world), "--lr", "4/4=1e-3", "--seeds", "2"])
    cases = testnet.cases_of(arguments, tmp_path / "out")
    names = [(case.configuration, case.seed) for case in cases]
    assert names[:4] == [("8/0", 1), ("4/4", 1), ("default", 1), ("8/0", 2)]
    assert cases[0].models == (str(world / "models" / "node-1"), str(world / "models" / "node-2"))
    with Stop() as stop, pytest.raises(RunError, match="failed"):
        go_on(cases[1], 1, stop, print)
    settings = tomllib.loads((cases[1].directory / "node.toml").read_text())
    assert settings["training"] == {"lr": 1e-3, "gate": False, "decay_after": 50}
    assert settings["tasks"]["mix"] == [
        {"verifier": "exact", "config": {"path": str(world / "tasks" / "sums.jsonl")}},
    ]
    assert settings["sampling"]["max_new_tokens"] == 8
    assert "sharing" not in cases[2].settings


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--models", "a", "b", "c"], "3 models for 8 nodes"),
        (["--tasks", "/nowhere/tasks.jsonl"], "/nowhere/tasks.jsonl: no such file"),
        (["--world", "/nowhere"], "/nowhere/models/node-1 is not there"),
        (["--world", "/nowhere", "--models", "a"], "leave out --models"),
        (["--configurations", "8/0", "9"], "'9' is no configuration"),
        (["--configurations", "8/0", "8/0"], "twice"),
    ],
)
def test_arguments_that_make_no_run_are_named(words: list[str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=problem):
        testnet.cases_of(testnet.parse(words), tmp_path)


def test_counts_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for parse in (testnet.parse, language.parse):
        with pytest.raises(SystemExit):
            parse(["--rounds", "0"])
        assert "must be at least 1" in capsys.readouterr().err


def test_slices_bring_all_configurations_forward_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = language.parse(["--nodes", "2", "--out", str(tmp_path), "--configurations", "8/0", "4/4"])
    cases = language.cases_of(arguments)
    asked: list[tuple[str, int]] = []

    def went_on(case: Case, rounds: int, *_: object) -> object:
        asked.append((case.configuration, rounds))
        for node in (1, 2):
            done = read_run(case).nodes[node - 1]
            with_records(case, node, [a_record(n, 0.5, time=n) for n in range(len(done) + 1, rounds + 1)])
        return read_run(case)

    monkeypatch.setattr(language, "go_on", went_on)
    twice(cases[0], 3)
    with Stop() as stop:
        language.train(cases, 7, 3, stop)
    assert asked == [("4/4", 3), ("8/0", 6), ("4/4", 6), ("8/0", 7), ("4/4", 7)]
