"""What an operator sees: on terminals of any size, without a terminal, and with text that means harm."""

import io
import json
import logging
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from node import logs
from node.config import LogSettings
from node.live import LiveView, sparkline
from node.snapshot import Snapshot
from node.text import clean, printable
from node.view import NodeInfo, PlainView, open_view
from tests.node.records import record, scored_group

ROOT = Path(__file__).parents[2]
PEER = "12D3KooWP5N9ap6sHz5uG7eRFfi8dSvWEGaDD4Dw2LmebELSHR4M"
SHORT = PEER[-8:]
INFO = NodeInfo(PEER, "my node", "tiny", "cpu", "transformers", "/data", 0, 300)
HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold red]markup[/] \u202egnp.exe\x9b31m\r\n\u200bend"


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level


SWARM = Snapshot(
    time=0, pid=1, swarm="main", peer_id=PEER, connected=3, mesh=2, sent=12, received=40, groups=130, admitted=118,
    rejected={"rate": 2, "wrong_prompt": 1},
)  # fmt: skip


def screen(
    width: int, height: int, rounds: int = 40, text: str = "42", swarm: Snapshot | None = None, **changes: Any
) -> list[str]:
    """The lines of a live view after some rounds."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    view = LiveView(console)
    view.started(INFO)
    for number in range(1, rounds + 1):
        groups = [scored_group(f"kind_{kind}", f"{text} prompt", (text, "wrong"), (1.0, 0.0)) for kind in range(9)]
        view.round_finished(
            record(number, **{"reward_local": number / rounds, "rejected": {text: 2}, **changes}), {}, groups
        )
        view.log_line(logging.INFO, f"line {number} {text}")
    if swarm is not None:
        view.network(swarm)
    view.phase("generate")
    view.progress(24, 64, "completions")
    rendered = io.StringIO()
    plain = Console(file=rendered, width=width, height=height, color_system=None)
    plain.print(view._render())
    return rendered.getvalue().splitlines()


def test_it_shows_the_node_its_progress_and_how_well_it_does() -> None:
    lines = screen(100, 40)
    text = "\n".join(lines)
    for expected in (
        SHORT,
        "my node",
        "round 40/300",
        "320 tokens/s",
        "24/64 completions",
        "reward     1.000",
        "generate 50%",
        "score 6%",
        "update 44%",
        "4 of 8 informative",
        "kind_0                       50.0%",
        "1.00 kind_0 …42 prompt → 42",
        "line 40 42",
    ):
        assert expected in text
    assert "▁" in text
    assert "█" in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 10), (20, 5), (5, 2), (1, 1)])
@pytest.mark.parametrize(("rounds", "swarm"), [(0, None), (40, None), (0, SWARM), (40, SWARM)])
def test_it_fits_every_terminal(width: int, height: int, rounds: int, swarm: Snapshot | None) -> None:
    lines = screen(width, height, rounds, swarm=swarm)
    assert len(lines) <= max(1, height - 1)
    assert all(len(line) <= width for line in lines)


def test_it_shows_the_swarm_and_what_came_of_others() -> None:
    text = "\n".join(
        screen(80, 24, swarm=SWARM, external_groups=3, reward_external=0.5, reward_local=0.25, rejected={})
    )
    assert "3 nodes, mesh 2   sent 12   received 40   admitted 118   rejected 3" in text
    assert "4 of 8 informative   3 of others, reward 0.500 (own 0.250)" in text
    assert all(f"kind_{kind} " in text for kind in range(9))
    assert "nodes" not in "\n".join(screen(80, 24)), "a node alone has no swarm to show"


def test_what_the_gate_refused_stands_with_what_else_was_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "rejected: stale 1, by the gate 3" in "\n".join(screen(100, 24, rejected={"stale": 1}, gate_refused=3))
    assert "rejected: by the gate 3" in "\n".join(screen(100, 24, rejected={}, gate_refused=3))
    assert "gate" not in "\n".join(screen(100, 24))
    with open_view(LogSettings()) as view:
        view.round_finished(record(1, gate_refused=3), {}, [])
        view.round_finished(record(2), {}, [])
    refused, none = capsys.readouterr().err.splitlines()
    assert "gate_refused=3" in refused
    assert "gate" not in none


def test_a_small_terminal_has_room_for_nine_kinds_and_the_data_directory() -> None:
    text = "\n".join(screen(80, 24))
    assert all(f"kind_{kind} " in text for kind in range(9))
    assert "more kinds of task" not in text
    assert "/data" in text
    assert text.count("→") == 3
    assert "line 40 42" in text


def test_an_echoed_key_finds_room_behind_the_last_line() -> None:
    assert len(screen(80, 24, text="x" * 200)[-1]) + len("^C^C") < 80


def test_the_last_frame_is_at_rest() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=24, color_system=None)
    with LiveView(console) as view:
        view.started(INFO)
        view.phase("checkpoint")
        view.progress(1, 2, "files")
    file = console.file
    assert isinstance(file, io.StringIO)
    last = file.getvalue().rpartition("swarmnode ")[2]
    assert "ended" in last
    assert "checkpoint" not in last
    assert "1/2" not in last


def test_hostile_text_does_nothing_to_the_terminal() -> None:
    text = "\n".join(screen(200, 60, text=HOSTILE))
    assert not any(ord(char) < 32 and char != "\n" for char in text)
    assert not any(char in text for char in "\x7f\x9b\u202e\u200b")
    assert "[bold red]markup[/]" in text, "shown as it is, not obeyed"


def test_text_of_strangers_is_made_harmless() -> None:
    assert clean(HOSTILE) == "·[2J·]0;owned·[bold red]markup[/] ·gnp.exe·31m ·end"
    assert clean("naïve 東京 🎉\tend") == "naïve 東京 🎉 end"
    assert printable("a\n\tb\x1b[2J") == "a\n\tb·[2J"


def test_a_sparkline_keeps_the_shape_at_any_width() -> None:
    assert sparkline([0, 0.5, 1], 10) == "▁▅█"
    assert sparkline([number / 999 for number in range(1000)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0], 10) == "▁▁"
    assert sparkline([], 10) == sparkline([1.0], 0) == ""


def test_without_a_terminal_a_round_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with open_view(LogSettings()) as view:
        assert isinstance(view, PlainView)
        view.started(INFO)
        view.phase("generate")
        view.progress(1, 64, "completions")
        view.round_finished(record(7, rejected={"stale": 1}), {"gcd": 0.25}, [scored_group()])
        view.message("warning", HOSTILE)
    started, finished, warned, more = capsys.readouterr().err.splitlines()
    assert "node started" in started
    assert "round=7/300 reward=0.25 informative=0.5" in finished.replace("'", "")
    assert "stale" in finished
    assert "·[2J" in warned
    assert "\x1b" not in warned
    assert more == "    ·end", "a line break in a text cannot begin a log line"


def test_a_round_line_tells_of_others_where_there_is_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    with open_view(LogSettings()) as view:
        view.round_finished(record(1), {}, [])
        view.network(SWARM)
        view.round_finished(record(2, external_groups=3, reward_external=0.5, peers=2), {}, [])
        view.round_finished(record(3, external_groups=0, peers=2), {}, [])
    alone, mixed, dry = capsys.readouterr().err.splitlines()
    assert "external" not in alone
    assert "external=3 reward_external=0.5 peers=2" in mixed
    assert "external=0 peers=2" in dry


def test_a_long_phase_is_reported_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    logs.configure(LogSettings())
    view = PlainView(clock=lambda: now)
    view.phase("generate")
    for done in range(64):
        now += 1.0
        view.progress(done, 64, "completions")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "done=29" in lines[0]
    assert "of=64" in lines[0]


def test_json_logs_are_json_whoever_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    with open_view(LogSettings(format="json")) as view:
        view.round_finished(record(7), {}, [])
        view.message("error", HOSTILE)
        logging.getLogger("some.library").warning("a %s", "warning")
        logging.getLogger("some.library").info("chatter")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["round", HOSTILE, "a warning"]
    assert [line["level"] for line in lines] == ["info", "error", "warning"]
    assert lines[0]["reward"] == 0.25
    assert all("timestamp" in line for line in lines)


def test_the_level_hides_less_important_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with open_view(LogSettings(level="warning")) as view:
        view.message("info", "quiet")
        view.message("warning", "loud")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == ["loud"]


ON_A_TERMINAL = f"""
import time
from node.config import LogSettings
from node.view import NodeInfo, open_view
from tests.node.records import record, scored_group
hostile = {HOSTILE!r}
with open_view(LogSettings()) as view:
    view.started(NodeInfo({PEER!r}, hostile, "tiny", "cpu", "transformers", "/data", 0, 300))
    for number in range(1, 2001):
        view.round_finished(record(number), {{}}, [scored_group(hostile, hostile, (hostile, ""), (1.0, 0.0))])
        view.message("info", f"info {{number}}")
    view.message("warning", "a warning " + hostile)
"""


def test_on_a_terminal_it_is_live_and_does_not_flood() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "PYTHONUTF8": "1"},
    ) as process:
        os.close(theirs)
        output = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                output += os.read(ours, 65536)
            except OSError:  # the terminal is closed: the program has ended
                break
        assert process.wait(60) == 0
    os.close(ours)
    text = output.decode()
    assert "round 2000/300" in text
    assert SHORT in text
    assert "a warning ·[2J" in text
    assert "\x1b]0;owned" not in text
    assert "\x1b[2J" not in text
    assert "\u202e" not in text
    # 2,000 rounds in a moment are a few redraws, not 2,000.
    assert text.count(SHORT) < 200
