"""A real node, seen in a headless browser and controlled by the commands of its machine."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.screenshots import PictureError, browser
from node.api.client import NoAnswer, NodeClient
from node.commands import controlling
from node.datadir import DataDir
from tests.e2e.nodes import QUICK, RunningNode, wait_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCREENSHOT = "SWARMNODE_SCREENSHOT"
"""Names the file that a picture of the dashboard is to be written to."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    folder = tmp_path_factory.mktemp("dashboard")
    settings: tuple[str, ...] = (
        "--set",
        "api.port=0",
        "--set",
        "node.name=<b>alice</b>",
        "--set",
        "engine.kind=transformers",
    )
    settings += ("--set", "evaluation.every=2", "--set", "evaluation.tasks=1")
    running = RunningNode(folder / "data", ("--silo", *settings, *QUICK), folder / "log", "tiny", {})
    yield running
    if running.process.poll() is None:
        running.kill()


@pytest.fixture
def chromium() -> Iterator[Any]:
    with ExitStack() as stack:
        try:
            yield stack.enter_context(browser())
        except PictureError as error:
            pytest.skip(str(error))


def test_the_dashboard_shows_rounds_as_they_come(node: RunningNode, chromium: Any) -> None:
    node.wait_for_round(2)
    url = NodeClient.at(node.data_dir).contact.address
    page = chromium.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    page.wait_for_selector("#state.training", timeout=60_000)
    seen = int(page.inner_text("#round"))
    wait_for(lambda: int(page.inner_text("#round")) > seen, 60, "for a round to appear")
    page.wait_for_selector("#chart-reward canvas", timeout=60_000)
    wait_for(lambda: "held out, sampled" in page.inner_text("#chart-reward .u-legend"), 60)
    page.wait_for_selector("#rollouts details", timeout=60_000)
    page.click("#rollouts details summary")
    page.wait_for_selector("#rollouts details[open] pre", timeout=60_000)
    assert page.inner_text("#rollouts details[open] pre")
    assert page.inner_text("#name") == "<b>alice</b>", "text, not markup"
    assert "trains alone" in page.inner_text("#swarm-line")
    page.wait_for_selector("#resources progress", timeout=60_000)
    if os.environ.get(SCREENSHOT):
        page.screenshot(path=os.environ[SCREENSHOT], full_page=True)
    page.click("#pause")
    page.wait_for_selector("#state.paused", timeout=60_000)
    assert page.inner_text("#pause") == "Resume"
    # A phone: nothing hangs over the edge.
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme="dark")
    wait_for(lambda: bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth")), 60)
    page.click("#pause")
    page.wait_for_selector("#state.training", timeout=60_000)
    # A relay is not asked for what it has not.
    page.route("**/status", lambda route: route.fulfill(json=route.fetch().json() | {"state": "relaying"}))
    page.wait_for_selector("#pause", state="hidden", timeout=60_000)
    assert page.is_visible("#stop")
    page.unroute("**/status")
    assert complaints == []


def test_the_commands_pause_resume_save_and_stop_it(node: RunningNode, capsys: pytest.CaptureFixture[str]) -> None:
    node.wait_for_round(2)
    client = NodeClient.at(node.data_dir)
    controlling.pause(node.data_dir, wait=True)
    assert client.get("status")["state"] == "paused"
    done = node.rounds()[-1]
    controlling.checkpoint(node.data_dir)
    assert client.get("status")["saved_round"] == done
    assert (node.data_dir / "checkpoints" / f"{done:08}").is_dir()
    time.sleep(1)
    assert node.rounds()[-1] == done, "it rests"
    controlling.print_served(node.data_dir)
    controlling.resume(node.data_dir)
    node.wait_for_round(done + 2)
    controlling.stop(node.data_dir, wait=True)
    assert node.wait(30) == 0
    said = capsys.readouterr().out
    for words in (f"round {done} is saved", "paused: paused for", client.contact.address, "stopped"):
        assert words in said
    assert "is saved" in node.log()
    assert "Traceback" not in node.log()
    assert not (node.data_dir / "api.json").exists()
    assert DataDir(node.data_dir).running() is None
    with pytest.raises(NoAnswer):
        controlling.resume(node.data_dir)
