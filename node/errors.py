"""Errors that are for the person at the keyboard."""


class NodeError(Exception):
    """Something the operator can put right. The message says what, and is printed without a traceback."""

    exit_status = 1
