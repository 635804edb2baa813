"""The pictures of the README: `make screenshots`, or `python -m bench.screenshots`, where Chromium is installed.

A swarm of tiny nodes runs on this machine until the first of them has done enough rounds. Drawn are that node's live
view, as it stood on its terminal (a pseudo-terminal here), and its dashboard in a headless browser.
"""

import argparse
import codecs
import fcntl
import io
import os
import pty
import re
import shutil
import signal
import struct
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from bench.nodes import start
from node.api.client import NodeClient
from node.errors import NodeError
from node.testnet.plan import NodePlan, Wishes, make_plans
from node.testnet.watch import Progress

COLUMNS, LINES = 110, 30
"""Of the terminal, in cells."""
WIDTH = 1280
"""Of the browser's window, in pixels."""

_SETTINGS = ("evaluation.every=10", "evaluation.tasks=18")
_ERASED = re.compile(r"\r(?:\x1b\[2K|\x1b\[1A)+")
"""What stands before each frame of a live view but the first: rich goes back over the one before, line by line."""
_KEPT = 2**16
"""Characters of a terminal's output, which hold several frames."""
_FONTS = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)
"""A picture needs no other server."""
_READY_MS = 60_000
_SECOND_LOOK_MS = 6_000
"""Until the page has looked at the resources twice: how busy a processor is follows from two looks."""


class PictureError(NodeError):
    """A picture cannot be taken. The message says what to do."""


class Terminal:
    """A node on a terminal of its own, which a thread reads: a node whose terminal takes no more would halt."""

    def __init__(self, plan: NodePlan) -> None:
        """Start it. Raises OSError."""
        self._main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        words = [word for word in plan.command() if word != "--no-tty"]
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONIOENCODING": "utf-8"}
        for name in ("NO_COLOR", "COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = start(words, side, environment)
        os.close(side)
        self._text = ""
        threading.Thread(target=self._read, daemon=True).start()

    def frame(self) -> str:
        """The newest whole frame, colours as escape codes in it. Raises PictureError if there is none yet."""
        frames = _ERASED.split(self._text)
        if len(frames) < 3:
            raise PictureError(f"no live view was drawn; its terminal has: {self._text[-2000:]}")
        return frames[-2]

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            try:
                self._text = (self._text + decoder.decode(os.read(self._main, 2**14)))[-_KEPT:]
            except OSError:  # the node has ended
                return


@contextmanager
def swarm(plans: Sequence[NodePlan]) -> Iterator[Terminal]:
    """The nodes of `plans`, the first on a terminal, until the block is left; then all are told to save and end."""
    processes = []
    try:
        terminal = Terminal(plans[0])
        processes.append(terminal.process)
        for plan in plans[1:]:
            with plan.log.open("ab") as log:
                processes.append(start(plan.command(), log))
        yield terminal
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def train(terminal: Terminal, plan: NodePlan, rounds: int) -> None:
    """Wait until the node on the terminal has done so many rounds. Raises PictureError if it ends before."""
    progress = Progress(plan.data_dir)
    told = time.monotonic()
    while progress.round < rounds:
        time.sleep(0.5)
        progress.read()
        if terminal.process.poll() is not None:
            raise PictureError(f"{plan.name} ended with status {terminal.process.returncode}: {terminal.frame()}")
        if time.monotonic() > told + 20:
            told = time.monotonic()
            print(f"round {progress.round} of {rounds}", file=sys.stderr, flush=True)


@contextmanager
def browser() -> Iterator[Any]:
    """Headless Chromium: the system's, else the one that playwright has fetched.

    Raises PictureError where there is none.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise PictureError("playwright is not installed: the extra `test` brings it") from error
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as play:
        if path is None and not os.path.exists(play.chromium.executable_path):
            raise PictureError("there is no Chromium: install one, or run `playwright install chromium`")
        # Its own sandbox needs what containers often lack; it shows this machine's own page alone.
        chromium = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            chromium.close()


def draw_dashboard(address: str, out: Path, more: bool) -> None:
    """`dashboard.png`, down to where the rollouts begin; with `more` the whole page, dark, and on a phone.

    Raises PictureError.
    """
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto(address)
        page.wait_for_selector("#chart-reward canvas", timeout=_READY_MS)
        page.wait_for_selector("#resources progress", timeout=_READY_MS)
        page.wait_for_selector("#peers tr:nth-child(2)", timeout=_READY_MS)
        page.wait_for_selector("#rollouts details", timeout=_READY_MS)
        page.wait_for_function("document.querySelector('#chart-reward .u-legend').innerText.includes('held out')")
        page.wait_for_timeout(_SECOND_LOOK_MS)
        height = page.evaluate("document.getElementById('rollouts').parentElement.offsetTop")
        page.screenshot(
            path=out / "dashboard.png",
            full_page=True,
            clip={"x": 0, "y": 0, "width": WIDTH, "height": height},
        )
        if not more:
            return
        page.screenshot(path=out / "dashboard-whole.png", full_page=True)
        page.emulate_media(color_scheme="dark")
        page.wait_for_timeout(1000)
        page.screenshot(path=out / "dashboard-dark.png", full_page=True)
        page.set_viewport_size({"width": 390, "height": 844})
        page.wait_for_timeout(1000)
        page.screenshot(path=out / "dashboard-phone.png", full_page=True)


def draw_terminal(frame: str, out: Path) -> None:
    """`terminal.svg`."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in frame.replace("\r", "").rstrip("\n").split("\n"):
        console.print(Text.from_ansi(line), no_wrap=True, overflow="crop", highlight=False)
    form = _FONTS.sub("", CONSOLE_SVG_FORMAT)
    svg = console.export_svg(title="swarmnode start", code_format=form, unique_id="terminal")
    (out / "terminal.svg").write_text(svg, "utf-8")


def main() -> None:
    """Run the swarm and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=150, help="of the node that is drawn")
    parser.add_argument("--out", type=Path, default=Path("docs/img"), metavar="DIR")
    parser.add_argument("--more", action="store_true", help="the whole page too, in the dark and on a phone")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the nodes are kept; default: nowhere")
    arguments = parser.parse_args()
    try:
        with ExitStack() as stack:
            where = arguments.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swarm-")))
            arguments.out.mkdir(parents=True, exist_ok=True)
            plans = make_plans(Wishes(nodes=arguments.nodes, directory=str(where), settings=_SETTINGS, seed=1))
            with swarm(plans) as terminal:
                train(terminal, plans[0], arguments.rounds)
                draw_terminal(terminal.frame(), arguments.out)
                draw_dashboard(NodeClient.at(plans[0].data_dir).contact.address, arguments.out, arguments.more)
    except NodeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
