"""Learners and engines that die or hang under a node: it goes on, counts them, and nothing of them is left."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.nodes import QUICK, RunningNode, StartNode, command_line, wait_for

pytestmark = pytest.mark.slow

VLLM = ("--engine", "vllm", "--set", "engine.memory_gb=0.1", "--set", "checkpoint.every=1", *QUICK)


def group_of(leader: int) -> list[psutil.Process]:
    """What is left of a learner and all it started: they share its session, whatever they call themselves."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, ProcessLookupError):
            pass
    return found


def learner_of(node: RunningNode) -> psutil.Process:
    """The node's learner, which may be about to start."""
    node.wait_until(lambda: bool(node.children("rl.learner_child")))
    return node.children("rl.learner_child")[0]


def restarts(node: RunningNode) -> int:
    """As the record has them."""
    return sum(record["engine_restarts"] for record in node.records())


class Trace:
    """What a learner and all it started hold now, to see later that it is gone."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self.processes = group_of(leader)
        self.shared = {path for process in self.processes for path in _shared_memory(process)}

    def assert_gone(self) -> None:
        """Neither a process nor shared memory is left after five seconds."""
        wait_for(lambda: not group_of(self.leader), 5, f"for the end of {self.processes}")
        assert not [path for path in self.shared if os.path.exists(path)]


def _shared_memory(process: psutil.Process) -> set[str]:
    try:
        # What vLLM's workers on a CPU share goes when the next learner starts.
        paths = {where.path for where in process.memory_maps() if where.path.startswith("/dev/shm/")}
        return {path for path in paths if not path.startswith("/dev/shm/vllm_dist_")}
    except psutil.Error:
        return set()


def test_hung_and_killed_learners_are_replaced_and_counted(start_node: StartNode) -> None:
    node = start_node("--rounds", "30", "--set", "engine.patience=3", "--set", "checkpoint.every=5", *QUICK)
    node.wait_for_round(3)
    # A machine that sleeps: nobody is hung.
    node.process.send_signal(signal.SIGSTOP)
    time.sleep(4)
    node.process.send_signal(signal.SIGCONT)
    node.wait_for_round(6)
    assert restarts(node) == 0
    hung = learner_of(node)
    hung.send_signal(signal.SIGSTOP)
    trace = Trace(hung.pid)
    node.wait_until(lambda: "did not answer for 3 s" in node.log())
    trace.assert_gone()
    node.wait_until(lambda: restarts(node) == 1)
    learner_of(node).kill()
    assert node.wait() == 0
    assert node.rounds() == list(range(1, 31))
    assert restarts(node) == 2


def test_an_engine_that_does_not_follow_the_policy_stops_the_node(start_node: StartNode) -> None:
    arguments = ("--seed", "1", "--set", "checkpoint.every=100", *QUICK)
    node = start_node("--rounds", "2", *arguments)
    assert node.wait() == 0
    broken = start_node("--rounds", "4", "--set", "engine.max_logprob_gap=1e-12", *arguments)
    assert broken.wait() == 1
    assert node.rounds() == [1, 2]
    assert "max_logprob_gap" in broken.log()
    assert "Traceback" not in broken.log()
    assert start_node("--rounds", "4", *arguments).wait() == 0
    assert node.rounds() == [1, 2, 3, 4], "what was trained before is there"


@pytest.mark.vllm
def test_a_killed_learner_with_vllm_inside_is_replaced_and_a_killed_node_leaves_nothing(start_node: StartNode) -> None:
    node = start_node(*VLLM)
    node.wait_for_round(2)
    learner = learner_of(node)
    trace = Trace(learner.pid)
    learner.kill()
    node.wait_until(lambda: restarts(node) == 1)
    trace.assert_gone()
    assert "resuming after round" in node.log()
    # A round is recorded just before its checkpoint: killed between the two, it is done again and has no restart then.
    node.wait_for_round(node.rounds()[-1] + 1)
    trace = Trace(learner_of(node).pid)
    node.kill()
    trace.assert_gone()
    done = node.rounds()[-1]
    # Whichever engine comes next goes on from there.
    again = start_node("--rounds", str(done + 20), "--set", "checkpoint.every=1", "--engine", "transformers", *QUICK)
    assert again.wait() == 0
    assert again.rounds() == list(range(1, done + 21))
    assert restarts(again) == 1


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        # The learner, the core and two workers.
        (['engine.args={"tensor_parallel_size": 2}'], 4),
        # The learner and the core, which samples while the policy is trained.
        (["training.overlap=true", "node.threads=1"], 2),
    ],
    ids=["parallel", "overlap"],
)
def test_a_killed_process_of_vllm_ends_its_learner_and_a_killed_node_ends_all(
    start_node: StartNode, tmp_path: Path, settings: list[str], processes: int
) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    node = start_node(*VLLM, *words, model=str(_model_of_two_halves(tmp_path / "model")))
    node.wait_for_round(3)
    assert restarts(node) == 0
    trace = Trace(learner_of(node).pid)
    (core,) = [process for process in trace.processes if "EngineCore" in command_line(process)]
    assert len(trace.processes) >= processes
    core.kill()
    node.wait_until(lambda: "lost a process of its engine" in node.log(), 20)
    trace.assert_gone()
    learner = learner_of(node)
    node.wait_until(lambda: len(group_of(learner.pid)) >= processes)
    trace = Trace(learner.pid)
    node.kill()
    trace.assert_gone()


def _model_of_two_halves(directory: Path) -> Path:
    """A model whose heads two processes can share."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from rl.models import resolve
    from rl.settings import ModelSettings

    tokenizer = AutoTokenizer.from_pretrained(str(resolve(ModelSettings(name="tiny")).location))
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
    )
    make: Any = LlamaForCausalLM
    make(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
