"""Text of strangers, made fit for a terminal."""

import unicodedata

_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def clean(text: str) -> str:
    """`text` on one line, without anything that a terminal or a reader's eye could take for something else.

    Control characters (escape sequences begin with one), direction overrides, zero-width and private characters
    become `·`; line breaks and tabs become a space.
    """
    flat = " ".join(text.split())
    return "".join("·" if unicodedata.category(char) in _INVISIBLE else char for char in flat)


def clean_lines(text: str) -> str:
    """`text` with each line made harmless, and all but the first indented: none can pass for a log line of its own."""
    return "\n    ".join(clean(line) for line in text.splitlines())


def printable(text: str) -> str:
    """`text` with its line breaks and tabs, and nothing else that acts on a terminal."""
    return "".join("·" if c not in "\n\t" and unicodedata.category(c) in _INVISIBLE else c for c in text)
