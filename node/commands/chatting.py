"""`swarmnode chat`."""

import io
import os
import sys
from dataclasses import dataclass, field

from node import logs
from node.config_sources import Loaded
from node.policy import CurrentPolicy, best, check_run, newest, open_policy
from node.text import printable
from rl.errors import LearnerError
from rl.rollouts import Sampling

HELP = """\
/base    switch between the trained policy and the base model; the conversation stays
/reset   begin a new conversation
/quit    end (so does Ctrl-D)"""


@dataclass
class Conversation:
    """What has been said, and who answers."""

    system: str | None = None
    base: bool = False
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """All turns, the system message first."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns


def talk(
    loaded: Loaded, conversation: Conversation, max_new_tokens: int, temperature: float, of_best: bool = False
) -> None:
    """Answer line after line from stdin until it ends. With a pipe, only answers go to stdout.

    `of_best` takes the best checkpoint instead of the newest. Raises DataDirError if there is no run and no flag names
    a model, NodeError if there is no best one.
    """
    logs.configure(loaded.config.log)
    check_run(loaded)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what is no text is shown as such, and answered all the same
    if conversation.system is not None:
        conversation.system = os.fsencode(conversation.system).decode(errors="replace")
    with open_policy(loaded.config, best if of_best else newest) as current:
        _converse(current, conversation, Sampling(1, max_new_tokens, temperature))


def _converse(current: CurrentPolicy, conversation: Conversation, sampling: Sampling) -> None:
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{_speaker(current, conversation)}. /help lists commands.", file=sys.stderr)
    while (line := _line(interactive)) is not None:
        text = line.strip()
        if text == "/quit":
            return
        if text.startswith("/"):
            print(_command(text, current, conversation), file=sys.stderr)
        elif text:
            _answer(text, current, conversation, sampling)


def _line(interactive: bool) -> str | None:
    if not interactive:
        return sys.stdin.readline() or None
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        print(file=sys.stderr)
        return None


def _command(text: str, current: CurrentPolicy, conversation: Conversation) -> str:
    if text == "/base":
        conversation.base = not conversation.base
        return f"now: {_speaker(current, conversation)}"
    if text == "/reset":
        conversation.turns.clear()
        return "new conversation"
    return HELP if text == "/help" else f"there is no command {text}\n{HELP}"


def _answer(text: str, current: CurrentPolicy, conversation: Conversation, sampling: Sampling) -> None:
    conversation.turns.append({"role": "user", "content": text})
    try:
        answer = current.learner.chat(
            conversation.messages,
            sampling,
            len(conversation.turns),
            base=conversation.base,
            say=lambda piece: print(printable(piece), end="", flush=True),
        )
    except LearnerError as error:
        conversation.turns.pop()
        print(f"\nerror: {error}", file=sys.stderr)
        return
    except KeyboardInterrupt:
        conversation.turns.pop()
        print("\nstopped", file=sys.stderr)
        return
    print()
    conversation.turns.append({"role": "assistant", "content": answer.text})


def _speaker(current: CurrentPolicy, conversation: Conversation) -> str:
    model = current.learner.describe()["model"]
    if conversation.base or current.checkpoint is None:
        return f"{model}, {'the base model' if current.checkpoint else 'not trained yet'}"
    return f"{model}, trained for {current.checkpoint.round} rounds"
