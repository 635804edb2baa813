"""Tasks for people over HTTP: the page `/contribute` and what it asks."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from node.api import body, contributing
from node.contributing.kept import FILE
from node.contributing.opening import Place, take_answers
from tests.node import test_contributing_desk as desk_tests
from tests.node.test_api_v1 import CLAIM, Node, serving
from tests.node.test_network import Watched
from tests.p2p.fakes import FakeTasks
from verifiers.base import Task


@asynccontextmanager
async def staffed(path: Path, scorer: FakeTasks | None = None) -> AsyncIterator[tuple[Node, desk_tests.Office]]:
    """A node with a desk whose tasks are of the verifier `fake`."""
    path.mkdir(exist_ok=True)
    async with serving(path / "node") as node:
        office = desk_tests.Office(path, scorer=scorer)
        with office.kept, node.seen.place.holding(office.desk):
            yield node, office


async def ask(node: Node, name: str, status: int = 200, **body: Any) -> Any:
    response = await node.client.post(f"/api/v1/contribute/{name}", headers=CLAIM, json=body)
    assert response.status_code == status, response.text
    return response.json()


async def test_a_task_is_handed_out_answered_scored_and_shared(tmp_path: Path) -> None:
    async with staffed(tmp_path) as (node, office):
        task = await ask(node, "task")
        assert task["prompt"].startswith("question ")
        assert "right" not in str(task), "the answer stays here"
        judged = await ask(node, "answer", id=task["id"], answer="wrong")
        assert judged == {"reward": 0, "right": False, "tries": 3, "over": False, "shared": False, "waiting": 0}
        failed = await ask(node, "answer", 400, id=task["id"], answer="\x1b[2J")
        assert failed["error"]["param"] == "answer"
        await ask(node, "answer", 400, id=task["id"], answer="x" * 51)
        await ask(node, "answer", 413, id=task["id"], answer="x" * 10_000)
        await ask(node, "answer", 400, id=task["id"])
        await ask(node, "answer", 400, id=task["id"], answer="right", reward=1)
        judged = await ask(node, "answer", id=task["id"], answer="right")
        assert (judged["right"], judged["over"], judged["shared"], judged["waiting"]) == (True, True, True, 1)
        await ask(node, "answer", 404, id=task["id"], answer="right")
        [group] = await office.sent()
        assert desk_tests.texts(group) == ["wrong", "right"]
        left = await ask(node, "task")
        assert left["prompt"] != task["prompt"]
        assert await ask(node, "next", id=left["id"]) == {"shared": False, "waiting": 0}
        for content in (b"", b"[", b"\xff", b"[" * 9999):
            response = await node.client.post("/api/v1/contribute/next", headers=CLAIM, content=content)
            assert response.status_code in (400, 413)


async def test_a_page_of_another_site_draws_nothing_and_answers_nothing(tmp_path: Path) -> None:
    async with staffed(tmp_path) as (node, office):
        for headers in ({}, {**CLAIM, "Origin": "http://attacker.example"}, {**CLAIM, "Sec-Fetch-Site": "cross-site"}):
            for name in ("task", "answer", "next"):
                refused = await node.client.post(f"/api/v1/contribute/{name}", headers=headers, json={})
                assert refused.status_code == 403
        assert office.stream.place == 0


async def test_tasks_handed_out_are_bounded_and_need_a_desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contributing, "MAX_OPEN", 2)
    async with staffed(tmp_path) as (node, _):
        first, second, _ = [await ask(node, "task") for _ in range(3)]
        await ask(node, "answer", 404, id=first["id"], answer="right")
        monkeypatch.setattr("node.contributing.desk.MAX_KEPT", 1)
        assert (await ask(node, "answer", id=second["id"], answer="right"))["shared"]
        assert (await ask(node, "task", 503))["error"]["code"] == "busy"
        page = await node.client.get("/contribute")
        assert page.status_code == 200
        for name in ("contribute.js", "client.js", "style.css"):
            assert (await node.client.get(f"/{name}")).status_code == 200
    async with serving(tmp_path / "node") as node:
        assert "takes no answers" in (await ask(node, "task", 503))["error"]["message"]


async def test_answers_are_scored_one_at_a_time(tmp_path: Path) -> None:
    class Slow(FakeTasks):
        now, most = 0, 0

        async def score(self, task: Task, completions: Sequence[str]) -> list[float]:
            self.now += 1
            self.most = max(self.most, self.now)
            await trio.sleep(0.05)
            self.now -= 1
            return [0.0 for _ in completions]

    scorer = Slow()
    async with staffed(tmp_path, scorer) as (node, _):
        tasks = [await ask(node, "task") for _ in range(4)]
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(lambda key: ask(node, "answer", id=key, answer="wrong"), task["id"])
    assert scorer.most == 1, "the sandbox is there for the node's own rounds first"


async def test_an_answer_that_does_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.1)
    head = b"POST /api/v1/contribute/next HTTP/1.1\r\nHost: localhost\r\nX-Swarmnode: 1\r\nContent-Length: 9\r\n\r\n"
    async with staffed(tmp_path) as (node, _), await trio.open_tcp_stream("127.0.0.1", node.port) as stream:
        await stream.send_all(head + b"{")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 408")


async def test_a_node_whose_answers_cannot_be_kept_trains_all_the_same(tmp_path: Path) -> None:
    async with staffed(tmp_path) as (node, _):
        (node.path / FILE).write_bytes(b"no database" * 100)
        view, place = Watched(), Place()
        office: Any = type("Office", (), {"config": node.seen.config, "data": node.seen.data, "identity": None})
        office.identity = type("Identity", (), {"public_bytes": b"1"})
        async with take_answers(office, place, desk_tests.Network(False), view):
            await trio.lowlevel.checkpoint()
            assert place.desk is None
        [(level, text)] = view.said
        assert (level, "nobody can contribute here" in text) == ("warning", True)
