"""The stream of server-sent events."""

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from node.api.feed import Feed
from rl.nurseries import unwrapped

BEAT_SECONDS = 15.0
"""Between two signs of life, by which a reader that has gone is noticed."""


class EventStream(Response):
    """Events of a feed, until the client leaves, falls behind, or the node stops."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. Raises ApiError, before anything is sent, if there are too many streams."""
        with self._feed.reading() as events, unwrapped():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
                await self._send(events, send)
                nursery.cancel_scope.cancel()

    async def _send(self, events: trio.MemoryReceiveChannel[bytes], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b": here\n\n", "more_body": True})
        try:
            while True:
                piece = b": still here\n\n"
                with trio.move_on_after(BEAT_SECONDS):
                    piece = await events.receive()
                # What has come meanwhile goes with it.
                pieces = [piece]
                try:
                    while True:
                        pieces.append(events.receive_nowait())
                except trio.WouldBlock:
                    pass
                await send({"type": "http.response.body", "body": b"".join(pieces), "more_body": True})
        except trio.EndOfChannel:
            end = b"event: end\ndata: {}\n\n"
            await send({"type": "http.response.body", "body": end, "more_body": False})


async def _cancel_when_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
