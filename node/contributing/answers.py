"""What counts as an answer, and why something is none."""

import unicodedata

from node.errors import NodeError

_BREAKS = "\n\t"


class NoAnswer(NodeError):
    """This is no answer: nothing of it is scored or sent. Another try may bring one."""


def answer_of(data: bytes | str, longest: int) -> str:
    """The answer in what somebody said, without white space around it, of at most `longest` characters.

    Raises NoAnswer if it is empty, too long, not UTF-8, or holds control characters: what is in it would be shown on
    the terminals of strangers, and learned from.
    """
    try:
        text = data.decode() if isinstance(data, bytes) else data
        text.encode()
    except UnicodeError as error:
        raise NoAnswer("this is no text in UTF-8") from error
    text = text.replace("\r\n", "\n").strip()
    if not text:
        raise NoAnswer("nothing was answered")
    if len(text) > longest:
        raise NoAnswer(f"longer than {longest} characters, which is what nodes take ([admission] max_completion)")
    if any(unicodedata.category(char) == "Cc" and char not in _BREAKS for char in text):
        raise NoAnswer("control characters are in it: that is binary data, or colours for a terminal")
    return text
