"""The HTTP server of the node that runs in a data directory, as this machine's own commands ask it."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from node.api.contact import CLAIM, Contact, find_contact
from node.datadir import DataDir
from node.errors import NodeError

SECONDS = 30.0
"""For an answer. A node sends a sign of life each 15 s, however long its round takes."""

_PREFIX = "/api/v1/"


class NoAnswer(NodeError):
    """The node cannot be asked, or refuses. The message says what to do."""


class NodeClient:
    """Asks one running node."""

    def __init__(self, data: DataDir) -> None:
        """Raises NoAnswer if no node runs there, or it serves no HTTP; DataDirError."""
        pid = data.running()
        if pid is None:
            raise NoAnswer(
                f"the node in {data.path} is not running: `swarmnode start --data-dir {data.path}` starts it"
            )
        contact = find_contact(data.path, pid)
        if contact is None:
            raise NoAnswer(
                f"the node in {data.path} (process {pid}) does not answer over HTTP: it has only just started, or [api]"
                " dashboard is off, or its port was taken (its log says so)"
            )
        self.contact: Contact = contact

    @classmethod
    def at(cls, path: Path) -> "NodeClient":
        """The node in a data directory. Raises NoAnswer, DataDirError."""
        return cls(DataDir.look(path))

    def get(self, name: str) -> Any:
        """The JSON of a GET. Raises NoAnswer."""
        with closing(self._request("GET", name)) as response:
            return json.loads(response.read())

    def post(self, name: str) -> Any:
        """The JSON of a POST. Raises NoAnswer."""
        with closing(self._request("POST", name)) as response:
            return json.loads(response.read())

    def events(self) -> Iterator[tuple[str, str]]:
        """Kind and JSON of each event, until the node ends the stream or goes. Raises NoAnswer if there is none."""
        with closing(self._request("GET", "events")) as response:
            kind = ""
            try:
                for line in response:
                    name, _, value = line.decode().rstrip("\n").partition(": ")
                    if name == "event":
                        kind = value
                    elif name == "data":
                        yield kind, value
            except (OSError, http.client.HTTPException):
                return

    def _request(self, method: str, name: str) -> http.client.HTTPResponse:
        parts = urlsplit(self.contact.address)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=SECONDS)
        headers = {CLAIM.decode(): "1"}
        if self.contact.token:
            headers["authorization"] = f"Bearer {self.contact.token}"
        try:
            connection.request(method, _PREFIX + name, headers=headers)
            response = connection.getresponse()
            if response.status < 300:
                return response
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"the node at {self.contact.address} does not answer: {error}") from error
        connection.close()
        raise NoAnswer(f"the node at {self.contact.address} refuses: {_message(body, response.status)}")


def _message(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {status}"
