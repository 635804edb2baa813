"""What becomes of answers: groups that others can learn from, kept until they are sent."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from node.contributing import kept
from node.contributing.answers import NoAnswer
from node.contributing.asking import GivenUp, ask
from node.contributing.desk import Desk
from node.contributing.kept import Kept, KeptError
from node.contributing.terminal import Lines, Prompt
from node.disk import Disk
from node.stop import Stop
from p2p.reasons import Reason
from p2p.verification import Verified, verify
from p2p.wire import decode_batch, encode_batch, seal_round
from rl.rollouts import MAX_GROUP, ScoredGroup
from tests.p2p.fakes import FakePool, FakeTasks, numbers
from tests.p2p.forging import key
from verifiers.base import Task, TaskRef

TRAIN = numbers()(20)


class Stream:
    """The questions of the verifier `fake`, one after the other."""

    def __init__(self, cursor: Mapping[str, int]) -> None:
        self.place = cursor.get("position", 0)

    @property
    def cursor(self) -> Mapping[str, int]:
        return {"position": self.place}

    async def draw(self, count: int, /) -> list[Task]:
        tasks = FakeTasks()
        refs = [TaskRef("fake", "1", "{}", 1, index) for index in TRAIN[self.place : self.place + count]]
        self.place += count
        return [await tasks.make(ref) for ref in refs]


class Network:
    """Hears what is sent if it is told to."""

    def __init__(self, hears: bool) -> None:
        self.hears = hears
        self.groups: list[ScoredGroup] = []

    async def deliver(self, groups: Sequence[ScoredGroup], number: int, /) -> None:
        if not self.hears:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        self.groups += groups


class Office:
    """A desk over a data directory."""

    def __init__(self, path: Path, samples: int = 4, scorer: FakeTasks | None = None) -> None:
        self.kept = Kept(path / "kept.sqlite", 7)
        self.pool = FakePool()
        self.stream = Stream(self.kept.cursor)
        disk = Disk(path, 0, Stop(), lambda level, text: None)
        self.desk = Desk(
            "person",
            self.stream,
            scorer or FakeTasks(),
            self.pool,
            self.kept,
            disk,
            samples=samples,
            longest=50,
            round=lambda: 3,
        )

    async def answered(self, *answers: str | bytes) -> bool:
        question = await self.desk.draw()
        for answer in answers:
            await self.desk.answer(question, answer)
        return await self.desk.finish(question)

    async def sent(self, hears: bool = True) -> list[ScoredGroup]:
        """What goes out within a moment."""
        network = Network(hears)
        with trio.move_on_after(0.05):
            await self.desk.send(network)
        return network.groups


def texts(group: ScoredGroup) -> list[str]:
    return [completion.text for completion in group.group.completions]


async def test_a_group_is_what_sets_answers_apart_and_receivers_admit_it(tmp_path: Path) -> None:
    office = Office(tmp_path)
    with office.kept:
        assert await office.answered("wrong", " right \n"), "tries until it was right"
        assert await office.answered("right"), "one right answer, beside none at all"
        assert await office.answered("right", "right", b"right"), "a program that always says the same"
        assert not await office.answered("wrong"), "nothing to learn from"
        assert not await office.answered("wrong", "worse")
        assert not await office.answered()
        groups = await office.sent()
        assert [texts(group) for group in groups] == [["wrong", "right"], ["right", ""], ["right", ""]]
        assert {group.origin for group in groups} == {"contribute:person"}
        assert [group.rewards for group in office.pool.groups] == [(0.0, 1.0), (1.0, 0.0), (1.0, 0.0)]
        [envelope] = seal_round(key(1), "main", 3, "person", [group.group for group in groups], lambda: 1, 0.0)
        for group in decode_batch(encode_batch(envelope.batch)).groups:
            found = await verify(group, FakeTasks(), 50, lambda ref: False)
            assert isinstance(found, Verified), Reason
            assert set(found.rewards) == {0.0, 1.0}
        assert office.desk.waiting == 0


async def test_a_group_has_no_more_answers_than_may_travel(tmp_path: Path) -> None:
    class Easy(FakeTasks):
        async def score(self, task: Task, completions: Sequence[str]) -> list[float]:
            return [float(text != "") for text in completions]

    office = Office(tmp_path, samples=MAX_GROUP, scorer=Easy())
    with office.kept:
        assert await office.answered(*(f"{number}" for number in range(100)))
        [group] = await office.sent()
        assert len(texts(group)) == MAX_GROUP
        assert texts(group)[-1] == ""


@pytest.mark.parametrize(
    "junk", ["", " \n", "x" * 51, b"\xff\xfe", b"\x00\x01", "\x1b[31mred", "\ud800", "a\x07", b"7\r8"]
)
async def test_what_is_no_text_is_no_answer_and_never_sent(tmp_path: Path, junk: str | bytes) -> None:
    office = Office(tmp_path)
    with office.kept:
        question = await office.desk.draw()
        with pytest.raises(NoAnswer):
            await office.desk.answer(question, junk)
        assert await office.desk.answer(question, "right\r\n") == 1.0
        assert await office.desk.finish(question)
        assert texts((await office.sent())[0]) == ["right", ""]


async def test_what_was_not_sent_is_sent_by_the_next_start_and_no_task_comes_twice(tmp_path: Path) -> None:
    office = Office(tmp_path)
    with office.kept:
        assert await office.answered("right")
        assert await office.answered("no", "right")
        await office.desk.draw()
        assert await office.sent(hears=False) == []
    office = Office(tmp_path)
    with office.kept:
        assert office.desk.waiting == 2
        assert (await office.desk.draw()).task.ref.index == TRAIN[2], "looked at alone, it comes again"
        assert len(await office.sent()) == 2
    office = Office(tmp_path)
    with office.kept:
        assert office.desk.waiting == 0
    with Kept(tmp_path / "kept.sqlite", 8) as other:
        assert other.cursor == {}, "another stream begins at its beginning"


async def test_nothing_piles_up_where_nobody_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.contributing.desk.MAX_KEPT", 3)
    office = Office(tmp_path)
    said: list[str] = []
    with office.kept, trio.move_on_after(0.3):
        await ask(office.desk, Echo("right"), None, 1, lambda level, text: said.append(text))
    with Kept(tmp_path / "kept.sqlite", 7) as left:
        assert len(left) == 3
    assert "wait for a node" in said[-1]


def test_a_damaged_file_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept.sqlite"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(KeptError, match="move it away"):
        Kept(path, 1)
    path.unlink()
    Kept(path, 1).__exit__(None, None, None)
    monkeypatch.setattr(kept, "_LAYOUT", 2)
    with pytest.raises(KeptError, match="layout 1"):
        Kept(path, 1)


class Echo:
    """Always says the same, or fails."""

    name = "echo"

    def __init__(self, *says: str | None) -> None:
        self.says = says

    async def answer(self, task: Task, sample: int) -> tuple[str, bool]:
        await trio.lowlevel.checkpoint()
        said = self.says[sample % len(self.says)]
        if said is None:
            raise NoAnswer("not today")
        return said, sample != 1


async def test_each_task_is_put_to_a_program_several_times(tmp_path: Path) -> None:
    office = Office(tmp_path)
    said: list[tuple[str, str]] = []
    with office.kept:
        await ask(office.desk, Echo("right", "cut", None), 2, 4, lambda *words: said.append(words))
        one, two = await office.sent()
        assert {c.text: c.finished for c in one.group.completions} == {"right": True, "cut": False}
        assert one.group.task.ref != two.group.task.ref
        assert ("warning", "1 of 4 answers are none: not today") in said
        with pytest.raises(GivenUp, match="not today"):
            await ask(office.desk, Echo(None), None, 4, lambda *words: None)


async def asked(office: Office, typed: bytes, tasks: int | None = None) -> str:
    """What a person is shown who types that."""
    shown: list[str] = []
    reading, writing = os.pipe()
    try:
        os.write(writing, typed)
        os.close(writing)
        await Prompt(office.desk, Lines(200, reading), shown.append, lambda: 2).run(tasks)
    finally:
        os.close(reading)
    return "\n".join(shown)


async def test_a_person_answers_until_it_is_right_or_goes_on(tmp_path: Path) -> None:
    office = Office(tmp_path)
    with office.kept:
        shown = await asked(office, b"wrong\n\nright\n/next\n\x1b[A\nri\\\nght\nright\nno\n/quit\nright\n")
        assert shown.count("--- task") == 4
        for expected in ("question", "wrong; 3 more tries", "right", "goes out to 2 nodes", "nothing to learn"):
            assert expected in shown
        assert "no answer: control characters" in shown
        assert [texts(group) for group in await office.sent()] == [["wrong", "right"], ["ri\nght", "right"]]
        # The end of the input is Ctrl-D; what was typed before it counts.
        shown = await asked(office, b"x" * 1000 + b"\nright")
        assert "no answer: longer than 50" in shown
        assert len(await office.sent()) == 1


async def test_lines_come_from_a_file_too_and_can_be_given_up(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    file.write_bytes(b"one\ntwo")
    descriptor = os.open(file, os.O_RDONLY)
    lines = Lines(10, descriptor)
    assert [await lines.next() for _ in range(3)] == [b"one", b"two", None]
    os.close(descriptor)
    reading, writing = os.pipe()
    with trio.move_on_after(0.05) as scope:
        await Lines(10, reading).next()
    assert scope.cancelled_caught
    for descriptor in (reading, writing):
        with suppress(OSError):
            os.close(descriptor)
