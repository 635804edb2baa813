"""A node's own tasks."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import trio

from verifiers.base import VerifierError
from verifiers.sandbox import open_sandbox
from verifiers.settings import CommandSettings, MixEntry, VerifierSettings
from verifiers.stream import HELD_OUT_SEED, TaskStream, seed_of

MIX = [
    MixEntry(config={"dataset": "gcd"}, weight=3),
    MixEntry(config={"dataset": "chain_sum"}),
    MixEntry(config={"dataset": "chain_sum", "max_terms": 2}),
]


async def test_the_stream_is_deterministic_weighted_and_without_held_out_prompts() -> None:
    async with open_sandbox(VerifierSettings(), []) as sandbox:
        one = await TaskStream.open(sandbox, MIX, seed_of(b"node"))
        same = await TaskStream.open(sandbox, MIX, seed_of(b"node"))
        other = await TaskStream.open(sandbox, MIX, seed_of(b"another node"))
        assert one.kinds == ["gcd", "chain_sum(default)", "chain_sum(max_terms=2)"]
        tasks = await one.draw(200)
        assert [*await same.draw(150), *await same.draw(50)] == tasks
        assert not {task.prompt for task in tasks} & {task.prompt for task in await other.draw(200)}
        assert not any(task.held_out for task in tasks)
        assert len({task.ref for task in tasks}) == 200
        counts = Counter(task.kind for task in tasks)
        assert set(counts) == set(one.kinds)
        assert counts["gcd"] > counts["chain_sum(default)"] + counts["chain_sum(max_terms=2)"] - 10
        assert counts["gcd"] < 150


async def test_a_restored_stream_goes_on_where_it_was() -> None:
    async with open_sandbox(VerifierSettings(), []) as sandbox:
        stream = await TaskStream.open(sandbox, MIX, 7)
        await stream.draw(30)
        cursor = json.loads(json.dumps(stream.cursor))
        expected = await stream.draw(40)
        resumed = await TaskStream.open(sandbox, MIX, 7)
        resumed.restore(cursor)
        assert await resumed.draw(40) == expected
        assert resumed.cursor == stream.cursor


async def test_a_cursor_of_another_mix_is_taken_as_far_as_it_goes() -> None:
    async with open_sandbox(VerifierSettings(), []) as sandbox:
        stream = await TaskStream.open(sandbox, MIX[:1], 7)
        seen = {task.ref for task in await stream.draw(20)}
        changed = await TaskStream.open(sandbox, MIX[:2], 7)
        changed.restore(stream.cursor)
        assert not seen & {task.ref for task in await changed.draw(40)}


async def test_a_cancelled_draw_loses_no_task() -> None:
    async with open_sandbox(VerifierSettings(), []) as sandbox:
        left, right = await TaskStream.open(sandbox, MIX, 7), await TaskStream.open(sandbox, MIX, 7)
        with trio.CancelScope() as scope:
            scope.cancel()
            await left.draw(10)
        assert await left.draw(10) == await right.draw(10)


async def test_held_out_tasks_are_the_same_for_all_and_distinct() -> None:
    async with open_sandbox(VerifierSettings(), []) as sandbox:
        training = await TaskStream.open(sandbox, MIX, seed_of(b"node"))
        trained = {task.prompt for task in await training.draw(100)}
        streams = [await TaskStream.open(sandbox, MIX, HELD_OUT_SEED, held_out=True) for _ in range(2)]
        await streams[1].draw(5)
        for kind in range(3):
            tasks = await streams[0].draw_distinct(kind, 20)
            assert tasks == await streams[1].draw_distinct(kind, 20)
            assert len({task.prompt for task in tasks}) == 20
            assert all(task.held_out and task.kind == streams[0].kinds[kind] for task in tasks)
            assert not trained & {task.prompt for task in tasks}


async def test_few_questions_give_few_held_out_tasks_or_an_explanation(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{n}?", "answer": str(n)}) for n in range(60)))
    single = tmp_path / "single.jsonl"
    single.write_text('{"question": "one?", "answer": "1"}')
    mix = [MixEntry(verifier="exact", config={"path": str(file)}) for file in (path, single)]
    async with open_sandbox(VerifierSettings(), []) as sandbox:
        stream = await TaskStream.open(sandbox, mix, HELD_OUT_SEED, held_out=True)
        assert stream.kinds == ["few", "single"]
        assert 0 < len(await stream.draw_distinct(0, 50)) < 20
        assert await stream.draw_distinct(1, 5) == []
        alone = await TaskStream.open(sandbox, mix[1:], 0, held_out=True)
        with pytest.raises(VerifierError, match=r"no held-out question of single.*widen"):
            await alone.draw(1)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ([], "empty"),
        ([MIX[0], MixEntry(config={"dataset": "gdc"})], r"entry 2: .*did you mean 'gcd'"),
        ([MIX[1], MixEntry(config={"dataset": "chain_sum", "min_terms": 2})], "twice"),
        ([MixEntry(verifier="exact", config={"path": "/no/such/file"})], "entry 1: /no/such/file cannot be read"),
    ],
)
async def test_a_bad_mix_is_explained(mix: list[MixEntry], message: str) -> None:
    async with open_sandbox(VerifierSettings(), []) as sandbox:
        with pytest.raises(VerifierError, match=message):
            await TaskStream.open(sandbox, mix, 0)


async def test_a_program_that_cannot_make_tasks_is_explained() -> None:
    command = CommandSettings(argv=[sys.executable, "-c", "raise SystemExit('no such level')"])
    async with open_sandbox(VerifierSettings(commands={"mine": command}), []) as sandbox:
        with pytest.raises(VerifierError, match=r"entry 1: .*commands\.mine.*no such level"):
            await TaskStream.open(sandbox, [MixEntry(verifier="command", config={"name": "mine"})], 0)


@pytest.mark.usefixtures("obedient")
async def test_tasks_that_cannot_be_made_are_passed_over_but_not_for_ever() -> None:
    async with open_sandbox(VerifierSettings(answer_seconds=1), []) as sandbox:
        mix = [MixEntry(verifier="obedient", config={"do": "!do skip 3"})]
        stream = await TaskStream.open(sandbox, mix, 0)
        tasks = await stream.draw(10)
        assert all(task.ref.index % 3 != 2 for task in tasks)
        skipped = stream.skipped
        assert skipped == sum(index % 3 == 2 for index in range(stream.cursor["obedient"]))
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.draw(10)
        await stream.draw_distinct(0, 10)
        assert stream.skipped == skipped, "only tasks that a draw passed over count, and once"
        late = await TaskStream.open(sandbox, [MixEntry(verifier="obedient", config={"do": "!do late 19"})], 0)
        assert all(task.ref.index >= 19 for task in await late.draw(3))
        with pytest.raises(VerifierError, match="entry 1: not this one"):
            await TaskStream.open(sandbox, [MixEntry(verifier="obedient", config={"do": "!do late 20"})], 0)
        broken = await TaskStream.open(sandbox, [MixEntry(verifier="obedient", config={"do": "!do first 1"})], 0)
        with pytest.raises(VerifierError, match="not this one"):
            await broken.draw(3)
