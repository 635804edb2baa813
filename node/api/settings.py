"""The settings of what the node serves over HTTP: dashboard, control, metrics, and answers of the policy."""

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, Field

from rl.settings import Section

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,256}=*")
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


def _address(host: str) -> str:
    """Raises ValueError for what is no address to listen at."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError as error:
        raise ValueError("must be an IP address, such as 127.0.0.1, ::1 or 0.0.0.0, or localhost") from error


def _token(value: str) -> str:
    """Raises ValueError for a token that is short, or that no header can carry."""
    if value and not _TOKEN.fullmatch(value):
        raise ValueError("must be 16 to 256 letters, digits or any of ._~+/-, as `openssl rand -hex 32` prints them")
    return value


def _names(values: list[str]) -> list[str]:
    """Raises ValueError for what is no host name."""
    for value in values:
        if not _NAME.fullmatch(value.lower()):
            raise ValueError(
                f"{value!r} is no host name: give it without a scheme and a port, such as node.example.org"
            )
    return [value.lower() for value in values]


class ApiSettings(Section):
    """[api]: what the node serves over HTTP while it runs."""

    dashboard: bool = True
    """The dashboard in a web browser, control of the node for programs (`/api/v1`), and metrics for Prometheus
    (`/metrics`)."""

    openai: bool = False
    """Let other programs chat with the policy as it is now, through an OpenAI-compatible endpoint. Their requests are
    answered between the steps of a round, one at a time."""

    host: Annotated[str, AfterValidator(_address)] = "127.0.0.1"
    """Address to listen at. At any but a loopback address every request needs the token, and is not encrypted: use it
    in a network that you trust, or behind a proxy with TLS."""

    port: int = Field(default=8471, ge=0, le=65535)
    """Port to listen at; 0 takes any free one. Where nobody chose a port and this one is taken, as by another node,
    it is the next free one."""

    token: Annotated[str, AfterValidator(_token)] = ""
    """What requests have to carry as `Authorization: Bearer TOKEN`. Empty: on a loopback address none is needed, on any
    other the node makes one and keeps it in `api.token` in its data directory."""

    names: Annotated[list[str], AfterValidator(_names)] = Field(default=[])
    """Host names under which browsers may ask, beside addresses and localhost; as of a proxy. A page of another site
    cannot take a name that is not here for its own."""

    max_tokens: int = Field(default=1024, ge=1, le=131072)
    """Longest answer of the OpenAI-compatible endpoint, in tokens, and the length of one whose request names none. The
    round waits for it."""

    waiting: int = Field(default=16, ge=1, le=1024)
    """Most requests that wait for an answer of the policy; one more is told to come back later."""

    @property
    def local(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.host).is_loopback
