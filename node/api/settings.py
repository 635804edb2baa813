"""The settings of what the node offers to other programs of its machine."""

import ipaddress
from typing import Annotated

from pydantic import AfterValidator, Field

from rl.settings import Section


def _loopback(host: str) -> str:
    """Raises ValueError for an address that other machines could reach."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise ValueError("must be 127.0.0.1, ::1 or localhost") from error
    if not address.is_loopback:
        raise ValueError(
            "must be a loopback address (127.0.0.1 or ::1): the endpoint asks nobody for a password, so no other"
            " machine may reach it; from elsewhere use a tunnel, such as `ssh -L`"
        )
    return host


class ApiSettings(Section):
    """[api]: what the node offers to other programs of this machine while it runs."""

    openai: bool = False
    """Let other programs chat with the policy as it is now, through an OpenAI-compatible endpoint. Their requests are
    answered between the steps of a round, one at a time."""

    host: Annotated[str, AfterValidator(_loopback)] = "127.0.0.1"
    """Address to listen at: a loopback address, since no password is asked for."""

    port: int = Field(default=8471, ge=0, le=65535)
    """Port to listen at; 0 takes any free one. Each node of a machine needs its own."""

    max_tokens: int = Field(default=1024, ge=1, le=131072)
    """Longest answer, in tokens, and the length of one whose request names none. The round waits for it."""

    waiting: int = Field(default=16, ge=1, le=1024)
    """Most requests that wait for their turn; one more is told to come back later."""
