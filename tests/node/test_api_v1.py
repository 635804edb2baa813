"""Dashboard, control and metrics over real HTTP, on a node that is made of what a test puts into its feed."""

import json
import logging
import re
import socket
import stat
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

from node import logs
from node.api import connections, feed, firsts, guard, openapi, server
from node.api.client import NoAnswer, NodeClient
from node.api.contact import TokenError, token_in_force
from node.api.control import Control
from node.api.current import CurrentLearner
from node.api.feed import Feed
from node.api.models import RolloutsQuery, Round
from node.api.server import PortError, listen, open_api
from node.api.settings import ApiSettings
from node.api.v1 import Seen
from node.config import Config, LogSettings, NodeSettings
from node.datadir import DataDir
from node.record import MetricsFile, Record
from node.snapshot import PeerRow, Snapshot
from node.view import NodeInfo
from rl.pool import SqlitePool
from rl.rollouts import ScoredGroup
from tests.node.records import evaluated, record, scored_group

ROOT = Path(__file__).parents[2]
ME = "12D3KooWP5N9ap6sHz5uG7eRFfi8dSvWEGaDD4Dw2LmebELSHR4M"
SECRET = "a-token-of-at-least-16"
CLAIM = {"X-Swarmnode": "1"}
HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e"


class Quiet:
    """A view that shows nothing."""

    def started(self, info: NodeInfo) -> None: ...
    def phase(self, name: str) -> None: ...
    def progress(self, done: int, total: int, unit: str) -> None: ...
    def network(self, snapshot: Snapshot) -> None: ...
    def round_finished(self, record: Record, per_kind: Mapping[str, float], groups: Sequence[ScoredGroup]) -> None: ...

    def message(self, level: str, text: str) -> None:
        getattr(logs.get(), level)(text)


class Node:
    """What is served of a node, and its client."""

    def __init__(self, seen: Seen, address: str, client: httpx.AsyncClient) -> None:
        self.seen, self.address, self.client = seen, address, client
        self.feed, self.control, self.path = seen.feed, seen.control, seen.data.path
        self.port = int(address.rpartition(":")[2])

    async def get(self, path: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Any:
        response = await self.client.get(f"/api/v1/{path}", headers=headers)
        assert response.status_code == status, response.text
        return response.json()

    async def post(self, name: str, status: int = 202, headers: Mapping[str, str] | None = CLAIM) -> Any:
        response = await self.client.post(f"/api/v1/{name}", headers=headers)
        assert response.status_code == status, response.text
        return response.json()

    def finish(self, number: int, kind: str = "gcd", reward: float = 0.0, **changes: Any) -> None:
        groups = [scored_group(kind, rewards=(0.0, reward))]
        self.control.done = number
        self.feed.round_finished(record(number, **changes), {kind: reward / 2}, groups)


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    logs.configure(LogSettings(), lambda level, text: None)
    yield
    root.handlers, root.level = handlers, level


@asynccontextmanager
async def serving(
    path: Path, groups: Sequence[ScoredGroup] = (), *, relay: bool = False, **settings: Any
) -> AsyncIterator[Node]:
    api = ApiSettings(**{"port": 0, **settings})
    config = Config(node=NodeSettings(data_dir=path, name="mine", relay=relay), api=api)
    with trio.fail_after(60), DataDir.open(path) as data, SqlitePool(data.pool_path, ME) as pool:
        pool.add(groups)
        if relay:
            data.pool_path.unlink()
        seen = Seen(config, data, ME, Feed(Quiet()), Control())
        async with (
            open_api(api, CurrentLearner(), seen.feed.message, seen) as address,
            httpx.AsyncClient(base_url=address, timeout=30, trust_env=False, verify=False) as client,
        ):
            yield Node(seen, address, client)


def info(done: int = 0) -> NodeInfo:
    return NodeInfo(ME, "mine", "tiny", "cpu", "transformers", "/data", done, None)


def snapshot(**changes: Any) -> Snapshot:
    peer = PeerRow(peer=HOSTILE, connected=True, in_mesh=True, groups=3, rejected={"rate": 1})
    values: dict[str, Any] = {"time": time.time(), "pid": 1, "swarm": "main", "peer_id": ME, "connected": 1}
    return Snapshot(**{**values, "mesh": 1, "groups": 5, "admitted": 3, "peers": [peer], **changes})


async def test_the_node_says_what_its_description_promises(tmp_path: Path) -> None:
    other = replace(scored_group("gcd", HOSTILE, (HOSTILE, "2")), origin="other", round=1)
    async with serving(tmp_path, [other]) as node:
        node.feed.started(info())
        node.feed.network(snapshot())
        node.finish(1, reward=1.0)
        document = await node.get("openapi.json")
        assert json.loads(json.dumps(document))["openapi"].startswith("3.1")
        references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
        assert references == set(document["components"]["schemas"])
        for operation in openapi.OPERATIONS:
            assert document["paths"][operation.path][operation.method.lower()]["summary"]
            if operation.method == "GET" and operation.answer is not None:
                answer = await node.get(operation.name)
                schema = document["components"]["schemas"][operation.answer.__name__]
                assert answer.keys() == schema["properties"].keys(), operation.name
                operation.answer.model_validate(answer)
        [rollout] = (await node.get("rollouts"))["rollouts"]
        assert rollout["prompt"] == HOSTILE, "as it is: it is shown as text"
        assert rollout["origin"] == "other"
        [peer] = (await node.get("peers"))["swarm"]["peers"]
        assert peer["peer"] == HOSTILE
        status = await node.get("status")
        assert (status["state"], status["round"], status["model"]) == ("training", 1, "tiny")


async def test_a_relay_says_that_it_is_one(tmp_path: Path) -> None:
    async with serving(tmp_path, relay=True) as node:
        node.feed.started(info())
        assert (await node.get("status"))["state"] == "relaying"
        assert (await node.get("rollouts"))["rollouts"] == []
        for name in ("pause", "resume", "checkpoint"):
            assert (await node.post(name, 409))["error"]["code"] == "relay"


def test_the_reference_is_the_one_that_the_code_makes() -> None:
    assert (ROOT / "docs/api.md").read_text() == openapi.markdown(), "run `python -m node.api.openapi > docs/api.md`"


async def test_rounds_come_in_pages_and_those_done_again_are_there_once(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "metrics.jsonl").append(record(1))
    async with serving(tmp_path) as node:
        for number in (2, 3, 4, 5):
            node.finish(number)

        async def rounds(query: str) -> list[int]:
            found = (await node.get(f"rounds?{query}"))["rounds"]
            return [Round.model_validate(one).round for one in found]

        assert await rounds("") == [1, 2, 3, 4, 5], "those of an earlier start too"
        assert await rounds("limit=2") == [4, 5]
        assert await rounds("from=2&limit=2") == [2, 3]
        assert await rounds("from=9") == []
        # A learner that died goes on from a checkpoint.
        node.feed.started(info(3))
        assert await rounds("") == [1, 2, 3]
        node.finish(4, reward=1.0)
        [last] = (await node.get("rounds?limit=1"))["rounds"]
        assert (last["round"], last["kinds"]) == (4, {"gcd": 0.5})
        for query in ("limit=0", "limit=1001", "limit=x", "from=-1", "form=1", "limit=" + "9" * 5000):
            error = (await node.get(f"rounds?{query}", 400))["error"]
            assert error["param"] in query


async def test_the_operator_pauses_resumes_saves_and_stops(tmp_path: Path) -> None:
    async with serving(tmp_path) as node:
        assert (await node.get("status"))["state"] == "starting"
        node.feed.started(info())
        assert (await node.post("pause"))["state"] == "pausing"
        assert node.control.paused
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.control.rest)
            await trio.testing.wait_all_tasks_blocked()
            assert (await node.get("status"))["state"] == "paused"
            assert (await node.post("resume"))["state"] == "training"
        assert not node.control.take_save()
        await node.post("checkpoint")
        assert node.control.take_save()
        assert not node.control.take_save(), "once"
        assert (await node.post("stop"))["state"] == "stopping"
        assert node.control.stopping


async def test_a_page_of_another_site_changes_nothing_and_reads_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as node:
        port = node.address.rpartition(":")[2]
        refused: list[dict[str, str]] = [
            {"Host": "attacker.example"},
            {"Host": f"localhost.attacker.example:{port}"},
            {"Host": "192.168.1.7"},
            {"Origin": "http://attacker.example"},
            {"Origin": "null"},
            {"Origin": f"http://127.0.0.1:{int(port) + 1}"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
        ]
        for headers in refused:
            assert (await node.client.get("/", headers=headers)).status_code == 403, headers
            await node.get("rollouts", 403, headers)
            await node.post("stop", 403, {**CLAIM, **headers})
        # What a form of such a page could send, were its browser too old to name it.
        assert "x-swarmnode" in (await node.post("stop", 403, headers=None))["error"]["message"]
        simple = {"content-type": "text/plain"}
        assert (await node.client.post("/api/v1/stop", headers=simple, content="x")).status_code == 403
        assert (await node.client.get("/api/v1/stop", headers=CLAIM)).status_code == 405
        asked = {"Origin": "http://attacker.example", "Access-Control-Request-Headers": "x-swarmnode"}
        preflight = await node.client.options("/api/v1/stop", headers=asked)
        assert preflight.status_code == 403
        assert not [name for name in preflight.headers if name.startswith("access-control")]
        assert not node.control.stopping
        own = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}", "Sec-Fetch-Site": "same-origin"}
        await node.post("stop", headers={**CLAIM, **own})
        assert node.control.stopping


PATHS = ("/api/v1/status", "/api/v1/events", "/api/v1/openapi.json", "/metrics", "/v1/models", "/nothing")


async def test_with_a_token_nothing_is_said_without_it(tmp_path: Path) -> None:
    async with serving(tmp_path, token=SECRET, openai=True) as node:
        for authorization in (None, SECRET, f"Basic {SECRET}", f"Bearer {SECRET}x", f"Bearer {SECRET[:-1]}", "Bearer"):
            headers = {"authorization": authorization} if authorization else {}
            for path in PATHS:
                response = await node.client.get(path, headers=headers)
                assert response.status_code == 401, (path, authorization)
                assert SECRET not in response.text
            await node.post("stop", 401, {**CLAIM, **headers})
        assert not node.control.stopping
        page = await node.client.get("/")
        assert page.status_code == 200, "the dashboard's own files hold nothing of the node, and ask for the token"
        right = {"authorization": f"Bearer {SECRET}"}
        assert (await node.client.get("/metrics", headers=right)).status_code == 200
        await node.get("status", 403, {**right, "origin": "http://attacker.example"})
        # The commands of this machine find it in the data directory, which is the owner's alone.
        contact = tmp_path / "api.json"
        assert stat.S_IMODE(contact.stat().st_mode) == 0o600
        status = await trio.to_thread.run_sync(lambda: NodeClient.at(tmp_path).get("status"))
        assert status["node_id"] == ME
        await node.post("stop", headers=right)
        assert node.control.stopping
    assert not contact.exists()
    with pytest.raises(NoAnswer, match="is not running"):
        NodeClient.at(tmp_path)


async def test_outside_loopback_a_token_is_made_and_kept(tmp_path: Path) -> None:
    open_to_all = ApiSettings(host="0.0.0.0")
    assert token_in_force(ApiSettings(), tmp_path) == "", "none where only this machine can ask"
    async with serving(tmp_path, host="0.0.0.0", names=["Node.Example.org"]) as node:
        made = (tmp_path / "api.token").read_text().strip()
        assert len(made) >= 32
        assert stat.S_IMODE((tmp_path / "api.token").stat().st_mode) == 0o600
        assert token_in_force(open_to_all, tmp_path) == made, "the same after a restart"
        port = node.address.rpartition(":")[2]
        node.client.base_url = httpx.URL(f"http://127.0.0.1:{port}")
        await node.get("status", 401)
        right = {"authorization": f"Bearer {made}"}
        for host, status in (("10.0.0.1:80", 200), ("node.example.org", 200), ("attacker.example", 403)):
            await node.get("status", status, {**right, "host": host})
        assert [line for line in node.feed.lines if "unencrypted" in line.text]
        assert not [line for line in node.feed.lines if made in line.text]
    (tmp_path / "api.token").write_text("short\n")
    with pytest.raises(TokenError, match="remove it"):
        token_in_force(open_to_all, tmp_path)


async def test_no_secret_is_told(tmp_path: Path) -> None:
    async with serving(tmp_path, token=SECRET) as node:
        right = {"authorization": f"Bearer {SECRET}"}
        node.feed.message("info", f"somebody logs {SECRET} by mistake")
        node.feed.message("warning", "HF_TOKEN=hf_abcdefgh and https://me:pass@host/x")
        logging.getLogger("some.library").error("api_key: %s", "sk-123456")
        await trio.testing.wait_all_tasks_blocked()
        lines = (await node.get("log", headers=right))["lines"]
        assert len([line for line in lines if "********" in line["text"]]) == 3
        texts = [json.dumps(lines)]
        for operation in openapi.OPERATIONS:
            if operation.method == "GET" and operation.name != "events":
                texts.append((await node.client.get(operation.path, headers=right)).text)
        for secret in (SECRET, "hf_abcdefgh", "me:pass", "sk-123456"):
            assert not [text for text in texts if secret in text]
        assert (await node.get("config", headers=right))["config"]["api"]["token"] == "********"


async def read_events(node: Node, wanted: int, told: list[str], begun: trio.Event) -> None:
    async with node.client.stream("GET", "/api/v1/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            begun.set()
            if line.startswith("event: "):
                told.append(line.removeprefix("event: "))
            if len(told) == wanted:
                return


async def test_what_happens_is_told_as_it_happens(tmp_path: Path) -> None:
    told: list[str] = []
    async with serving(tmp_path) as node:
        async with trio.open_nursery() as nursery:
            begun = trio.Event()
            nursery.start_soon(read_events, node, 5, told, begun)
            await begun.wait()
            node.feed.started(info())
            node.feed.phase("generate")
            node.finish(1)
            await node.post("pause")
        assert sorted(told) == ["message", "phase", "round", "started", "state"]
        await trio.testing.wait_all_tasks_blocked()
        assert not node.feed._readers, "who has left is forgotten"


async def test_who_reads_no_events_is_cut_off_and_holds_up_nobody(tmp_path: Path) -> None:
    async with serving(tmp_path) as node:
        with node.feed.reading() as slow, node.feed.reading() as quick:
            for number in range(1, feed.MAX_UNREAD + 3):
                # Returns at once, whoever reads: it is called by the rounds.
                node.finish(number)
                quick.receive_nowait()
            for _ in range(feed.MAX_UNREAD):
                slow.receive_nowait()
            with pytest.raises(trio.EndOfChannel):
                slow.receive_nowait()
        assert (await node.get("rounds?limit=1"))["rounds"][0]["round"] == feed.MAX_UNREAD + 2


async def test_streams_requests_and_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_READERS", 1)
    monkeypatch.setattr(guard, "MAX_REQUESTS", 2)
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    async with serving(tmp_path) as node:
        async with node.client.stream("GET", "/api/v1/events") as response:
            # Held: a response whose reader is collected is closed.
            lines = response.aiter_lines()
            await anext(lines)
            refused = await node.client.get("/api/v1/events")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            assert refused.headers["retry-after"]
            monkeypatch.setattr(feed, "MAX_READERS", 9)
            async with node.client.stream("GET", "/api/v1/events") as second:
                more = second.aiter_lines()
                await anext(more)
                assert (await node.client.get("/api/v1/status")).status_code == 503
        port = node.port
        held = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(8)]
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError)):
            async with httpx.AsyncClient(trust_env=False, verify=False) as other:
                await other.get(f"{node.address}/api/v1/status")
        for stream in held:
            await stream.aclose()
        while True:
            try:
                assert (await node.client.get("/api/v1/status")).status_code == 200
            except httpx.TransportError:
                await trio.sleep(0.05)
            else:
                break


async def test_who_does_not_take_an_answer_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.2)
    async with serving(tmp_path) as node:
        long = record(1, rejected={f"reason{place}": place for place in range(300)})
        for number in range(1, 1001):
            node.feed.history.add(long.model_copy(update={"round": number}), {})
        port = node.port
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await trio.to_thread.run_sync(client.connect, ("127.0.0.1", port))
            client.sendall(f"GET /api/v1/rounds?limit=1000 HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
            await trio.sleep(1.0)
            whole = len((await node.client.get("/api/v1/rounds?limit=1000")).content)

            def read_all() -> int:
                count = 0
                client.settimeout(20)
                try:
                    while piece := client.recv(2**16):
                        count += len(piece)
                except ConnectionResetError:
                    pass
                return count

            assert await trio.to_thread.run_sync(read_all) < whole


@pytest.mark.parametrize(
    "asked",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5),
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: \r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    ],
    ids=["HTTP/2", "HTTP/2 later", "half a WebSocket"],
)
async def test_only_plain_http_is_spoken(tmp_path: Path, asked: bytes) -> None:
    async with serving(tmp_path) as node, await trio.open_tcp_stream("127.0.0.1", node.port) as stream:
        await stream.send_all(asked)
        said = await stream.receive_some()
        assert said.startswith((b"HTTP/1.1 2", b"HTTP/1.1 403")), "no 101, and no frame"
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        with suppress(trio.BrokenResourceError):
            while await stream.receive_some():
                pass


async def test_rollouts_are_found_by_origin_kind_and_place_and_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [
        replace(scored_group(kind, f"{kind} {number}", (f"{number}", "x" * 5000)), origin=origin, round=number)
        for number, (kind, origin) in enumerate([("gcd", ME), ("gcd", "peer"), ("lcm", "peer"), ("lcm", ME)], 1)
    ]
    async with serving(tmp_path, groups) as node:

        async def prompts(query: str) -> list[str]:
            return [one["prompt"] for one in (await node.get(f"rollouts?{query}"))["rollouts"]]

        assert await prompts("") == ["lcm 4", "lcm 3", "gcd 2", "gcd 1"]
        assert await prompts("origin=own") == ["lcm 4", "gcd 1"]
        assert await prompts("origin=others&kind=lcm") == ["lcm 3"]
        newest = (await node.get("rollouts?limit=1"))["rollouts"][0]
        assert await prompts(f"before={newest['id']}&limit=2") == ["lcm 3", "gcd 2"]
        assert newest["own"]
        short, long = newest["completions"]
        assert (short["text"], short["cut"], short["reward"]) == ("4", False, 0.0)
        assert (len(long["text"]), long["cut"]) == (4000, True)
        monkeypatch.setattr("node.api.stored.MAX_ANSWER", 9000)
        assert await prompts("") == ["lcm 4", "lcm 3"], "the answer has a size"
        assert RolloutsQuery().limit <= 50
        await node.get("rollouts?limit=51", 400)
        await node.get("rollouts?kind=%27%20OR%201=1", 200)


def solved_by_others(path: Path, used: Sequence[int]) -> None:
    """A pool with a half-right and a right answer of peers to `gcd`, the right one used in those rounds."""
    half = replace(scored_group("gcd", "a", rewards=(0.0, 0.4)), origin="half", round=1)
    right = replace(scored_group("gcd", "b", rewards=(0.0, 1.0)), origin="right", round=2)
    with SqlitePool(path, ME) as pool:
        pool.add([half, right])
        for number in used:
            pool.settle([1, 2], [], number)


@pytest.mark.parametrize(("used", "trained"), [([], None), ([3], 3), ([5], None)])
async def test_a_first_success_is_told_with_what_of_others_came_before(
    tmp_path: Path, used: list[int], trained: int | None
) -> None:
    solved_by_others(tmp_path / "pool.sqlite", used)
    path = tmp_path / server.FIRSTS
    async with serving(tmp_path) as node:
        node.finish(3, "gcd", 0.5)
        assert (await node.get("firsts"))["firsts"] == [], "half right is not right"
        node.finish(4, "gcd", 1.0)
        node.finish(5, "gcd", 1.0)
        node.finish(6, "lcm", 1.0)
        while not path.exists() or "lcm" not in path.read_text() or "null" not in path.read_text():
            await trio.sleep(0.01)
        await trio.testing.wait_all_tasks_blocked()
        gcd, lcm = (await node.get("firsts"))["firsts"]
        assert (gcd["round"], lcm["round"]) == (4, 6)
        assert gcd["forerunner"] == {"origin": "right", "round": 2, "trained_in": trained}
        assert lcm["forerunner"] is None
    async with serving(tmp_path) as node:
        assert [one["round"] for one in (await node.get("firsts"))["firsts"]] == [4, 6], "kept"
        node.feed.started(info(5))
        assert [one["round"] for one in (await node.get("firsts"))["firsts"]] == [4], "that round is done again"
    assert firsts.find_forerunner(tmp_path / "pool.sqlite", "gcd", 2) is None, "what came later helped nothing"


async def test_evaluations_are_shown_as_far_as_they_can_be_read(tmp_path: Path) -> None:
    async with serving(tmp_path) as node:
        assert (await node.get("evaluations"))["evaluations"] == []
        five, ten = (evaluated(number, number / 10).model_dump_json() for number in (5, 10))
        lines = [five, "damaged", "[" * 100_000, "[]", '{"round": 7, "greedy": 0.5}', ten, '{"rou']
        (tmp_path / "evaluations.jsonl").write_text("\n".join(lines))
        assert (await node.get("evaluations"))["evaluations"] == [json.loads(five), json.loads(ten)]


async def test_damaged_files_keep_nothing_from_being_served(tmp_path: Path) -> None:
    (tmp_path / server.FIRSTS).write_text("{")
    (tmp_path / "metrics.jsonl").write_text("damaged\n" * 2)
    async with serving(tmp_path) as node:
        assert (await node.get("rounds"))["rounds"] == []
        assert [line for line in node.feed.lines if "earlier rounds are not shown" in line.text]


async def test_prometheus_and_grafana_speak_of_the_same_things(tmp_path: Path) -> None:
    async with serving(tmp_path) as node:
        node.feed.started(info())
        node.feed.network(snapshot(peers=[PeerRow(peer=HOSTILE)] * 3))
        node.finish(1, rejected={"rate": 2}, tokens_generated=640, reward_external=0.25, gate_threshold=-2.0)
        node.finish(2, tokens_generated=60, reward_external=0.25, gate_threshold=-2.0)
        (tmp_path / "evaluations.jsonl").write_text(evaluated(2, 0.25).model_dump_json() + "\n")
        text = (await node.client.get("/metrics")).text
    families = list(text_string_to_metric_families(text))
    samples = {sample.name: sample for family in families for sample in family.samples}
    assert samples["swarmnode_round"].value == 2
    assert samples["swarmnode_tokens_generated_total"].value == 700
    assert samples["swarmnode_rejected_total"].labels == {"reason": "rate"}
    assert samples["swarmnode_peers"].value == 1
    held_out = [s for family in families for s in family.samples if s.name == "swarmnode_held_out_accuracy"]
    assert {s.labels["answers"]: s.value for s in held_out}["sampled"] == 0.25
    assert samples["swarmnode_info"].labels["model"] == "tiny"
    assert "script" not in text, "no label holds what a stranger chose"
    boards = list((ROOT / "docker/grafana").glob("*.json"))
    assert boards
    for board in boards:
        shown = re.findall(
            r"swarmnode_\w+", json.dumps([p.get("targets") for p in json.loads(board.read_text())["panels"]])
        )
        assert shown
        assert set(shown) <= samples.keys()


def test_a_taken_port_that_nobody_chose_is_another() -> None:
    said: list[str] = []
    # Whatever runs on this machine, one of the two does not get what the other has.
    with listen(ApiSettings(), lambda level, text: said.append(text)) as first:
        taken = first.getsockname()[1]
        with listen(ApiSettings(), lambda level, text: said.append(text)) as second:
            assert second.getsockname()[1] > taken
            assert any(f"has port {second.getsockname()[1]}" in text for text in said)
        with pytest.raises(PortError, match=r"\[api\] port"):
            listen(ApiSettings(port=taken), lambda level, text: None)


WEB = ROOT / "node/web"


async def test_the_dashboard_runs_no_text_of_strangers_and_needs_no_other_server(tmp_path: Path) -> None:
    async with serving(tmp_path) as node:
        page = await node.client.get("/")
        policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert page.headers["x-content-type-options"] == "nosniff"
        wanted = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        for script in WEB.glob("*.js"):
            wanted += re.findall(r'from "\./([^"]+)"', script.read_text())
        for path in wanted:
            response = await node.client.get(f"/{path}")
            assert response.status_code == 200, path
            assert response.headers["content-security-policy"] == page.headers["content-security-policy"]
        for path in ("/../config.py", "/%2e%2e/config.py", "/vendor/../../config.py", "/vendor/LICENSE/x"):
            assert (await node.client.get(path)).status_code == 404
    for file in [*WEB.glob("*.js"), *WEB.glob("*.html"), WEB / "vendor/uplot.js"]:
        code = file.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in code, (file.name, word)
    for file in WEB.glob("*.html"):
        html = file.read_text()
        assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", html), "nothing inline"
        assert not re.search(r"https?://", html)
