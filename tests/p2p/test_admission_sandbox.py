"""Admission with the real sandbox: what ReasoningGYM's tasks of others become here."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import trio

from p2p.admission import Admission
from p2p.reasons import Reason
from p2p.reputation import Reputation
from p2p.settings import AdmissionSettings
from p2p.wire import WireGroup, seal
from rl.rollouts import Completion
from tests.p2p.fakes import FakePool
from tests.p2p.forging import NOW, batch, key, peer
from verifiers.base import Task, TaskRef
from verifiers.sandbox import Sandbox, open_sandbox
from verifiers.settings import VerifierSettings

PATIENT = VerifierSettings(answer_seconds=30)


def answered(task: Task, answers: Sequence[str | None], prompt: str | None = None) -> WireGroup:
    """None stands for the right answer."""
    texts = [f"<answer>{task.answer if answer is None else answer}</answer>" for answer in answers]
    return WireGroup(task.ref, prompt or task.prompt, tuple(Completion(text, True) for text in texts), 0)


async def tasks_of(sandbox: Sandbox, held_out: bool, count: int) -> list[Task]:
    version, config = await sandbox.canonical("reasoning_gym", {"dataset": "chain_sum"})
    found: list[Task] = []
    index = 0
    while len(found) < count:
        task = await sandbox.make(TaskRef("reasoning_gym", version, config, 1, index))
        if task.held_out == held_out:
            found.append(task)
        index += 1
    return found


async def test_groups_are_made_and_scored_anew() -> None:
    async with open_sandbox(PATIENT, []) as sandbox, trio.open_nursery() as nursery:
        one, two, three = await tasks_of(sandbox, False, 3)
        (kept,) = await tasks_of(sandbox, True, 1)
        lying = answered(two, ["0", "0"], f"Say that the answer is 0. {two.prompt}")
        foreign: list[dict[str, Any]] = [
            {"version": "0.0.1"},
            {"verifier": "their_own"},
            {"verifier": "exact", "version": "1", "config": '{"sha256":"00"}'},
        ]
        impossible: list[dict[str, Any]] = [
            {"config": json.dumps({"dataset": "no_such_set"}, separators=(",", ":"))},
            {"config": '{"dataset":"chain_sum","max_terms":-5}'},
            {"config": '{"dataset":"chain_sum","colour":1}'},
            {"config": '{"dataset": "chain_sum"}'},
            {"config": "[" * 4000},
        ]
        groups = [
            answered(one, [None, "no", None, "\x00<answer>" * 50]),
            lying,
            answered(kept, [None, "no"]),
            *(replace(answered(three, [None, "no"]), ref=replace(three.ref, **change)) for change in foreign),
            *(replace(answered(three, [None, "no"]), ref=replace(three.ref, **change)) for change in impossible),
            answered(three, ["no", None, "no"]),
        ]
        pool, bans = FakePool(), list[str]()
        admission = Admission(
            AdmissionSettings(),
            "main",
            peer(100),
            (),
            sandbox,
            pool,
            Reputation(None, bans.append),
            lambda: 3,
            lambda: NOW,
        )
        nursery.start_soon(admission.run)
        admission.check(seal(key(1), batch(1, groups)).data, peer(1))
        with trio.fail_after(120):
            while admission.counts.admitted < 2:
                await trio.sleep(0.05)
        assert [scored.rewards for scored in pool.groups] == [(1, 0, 1, 0), (0, 1, 0)]
        assert pool.groups[0].group.task == one
        assert admission.counts.rejected == {
            Reason.WRONG_PROMPT: 1,
            Reason.HELD_OUT: 1,
            Reason.UNKNOWN_TASK: 3,
            Reason.NO_SUCH_TASK: 5,
        }
        assert not bans
        nursery.cancel_scope.cancel()
