"""The body of a request, no longer and no slower than it may be."""

import trio
from starlette.requests import Request

from node.api.errors import ApiError

BODY_SECONDS = 30.0
"""For the whole of it."""


async def read_body(request: Request, most: int) -> bytes:
    """All of it, at most so many bytes. Raises ApiError if there are more, or they take too long."""
    body = bytearray()
    with trio.move_on_after(BODY_SECONDS):
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise ApiError(413, f"a request has at most {most} bytes here", code="request_too_large")
        return bytes(body)
    raise ApiError(408, f"the request took longer than {BODY_SECONDS:g} s to arrive", code="timeout")
