"""How the commands of this machine reach the running node: `api.json` in its data directory, for its owner alone.

Beside it may lie `api.token`, the token that the node made for itself; it stays from one start to the next.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from node.api.settings import ApiSettings
from node.datadir import write_atomically
from node.errors import NodeError

CONTACT, TOKEN = "api.json", "api.token"

CLAIM = b"x-swarmnode"
"""A header without meaning. A page of another site cannot send it: its browser would first ask whether it may, and is
never told yes."""


class TokenError(NodeError):
    """The file with the token cannot be used."""


class Contact(BaseModel):
    """Where a node's HTTP server is, and what it asks for."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    pid: int
    address: str
    """As in http://127.0.0.1:8471."""
    token: str = ""


def token_in_force(settings: ApiSettings, directory: Path) -> str:
    """What requests have to carry; empty if nothing. Made and kept where one is needed and none is set.

    Raises TokenError if the one that was kept is damaged, or OSError.
    """
    if settings.token or settings.local:
        return settings.token
    path = directory / TOKEN
    try:
        kept = path.read_text("ascii").strip()
    except FileNotFoundError:
        kept = secrets.token_urlsafe(32)
        write_atomically(path, f"{kept}\n".encode(), mode=0o600)
        return kept
    except UnicodeDecodeError:
        kept = ""
    try:
        return ApiSettings(token=kept or "-").token
    except ValidationError as error:
        raise TokenError(f"{path} holds no token: remove it, and the next start makes another") from error


@contextmanager
def contactable(directory: Path, contact: Contact) -> Iterator[None]:
    """Tell the commands of this machine, while the block runs. Raises OSError."""
    path = directory / CONTACT
    write_atomically(path, contact.model_dump_json().encode() + b"\n", mode=0o600)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def find_contact(directory: Path, pid: int | None) -> Contact | None:
    """How to reach the node with that process id; None if it does not serve, or has not begun to."""
    if pid is None:
        return None
    try:
        contact = Contact.model_validate_json((directory / CONTACT).read_bytes())
    except (OSError, ValidationError):
        return None
    return contact if contact.pid == pid else None


def own_contact(address: str, token: str) -> Contact:
    """The contact of this process."""
    return Contact(pid=os.getpid(), address=address, token=token)
