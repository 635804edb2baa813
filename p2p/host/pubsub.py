"""Gossip's streams: one that is read and one that is written for each peer, each by a single task."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from p2p.host import scores
from p2p.host.cache import Link
from p2p.host.gossip import Gossip
from p2p.host.messages import Author, Malformed, parse
from p2p.host.settings import MAX_MESSAGE, MAX_RPC
from p2p.host.streams import Reader, finish, translated
from p2p.transport import TransportError

logger = logging.getLogger(__name__)

PROTOCOLS = ("/meshsub/1.2.0", "/meshsub/1.1.0")
HEARTBEAT_SECONDS = 1.0
_FRAME_SECONDS = 30.0  # for a frame that has begun to arrive
_WRITE_SECONDS = 10.0
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.3, 30.0
_PUBLISH_SECONDS = 5.0
_MAX_SUBSCRIPTIONS = 256  # in one frame


class Pubsub:
    """Runs gossip over a host. `open_stream(peer, protocols)` opens a libp2p stream; `drop(peer)` disconnects."""

    def __init__(
        self,
        gossip: Gossip,
        author: Author,
        open_stream: Callable[[str, tuple[str, ...]], Awaitable[Any]],
        misbehaved: Callable[[str, str], None],
        drop: Callable[[str], None],
    ) -> None:
        self._gossip = gossip
        self._author = author
        self._open = open_stream
        self._misbehaved = misbehaved
        self._drop = drop

    async def run(self) -> None:
        """The heartbeat."""
        while True:
            await trio.sleep(HEARTBEAT_SECONDS)
            try:
                self._gossip.heartbeat()
            except Exception:
                logger.exception("the gossip heartbeat failed")

    def came(self, peer: str, outbound: bool) -> Link:
        """A peer is connected; its link must then be run."""
        link = self._gossip.links[peer] = Link(peer, outbound)
        return link

    def went(self, peer: str) -> None:
        """A peer is gone."""
        link = self._gossip.links.pop(peer, None)
        if link is not None:
            self._gossip.down(link)
            link.scope.cancel()
            if link.reading is not None:
                link.reading.cancel()

    # Writing

    async def run_link(self, link: Link) -> None:
        """Keep a stream to a peer open and write what is due, until the peer is gone."""
        delay = _RETRY_SECONDS
        with link.scope:
            while True:
                begun = trio.current_time()
                try:
                    with translated(link.peer, "opening the gossip stream"):
                        stream = await self._open(link.peer, PROTOCOLS)
                    await self._write(link, stream)
                except TransportError as error:
                    logger.debug("gossip to %s: %s", link.peer, error)
                # A peer that takes each stream and resets it must not be asked for one several times a second.
                if trio.current_time() - begun > _MAX_RETRY_SECONDS:
                    delay = _RETRY_SECONDS
                await trio.sleep(delay)
                delay = min(2 * delay, _MAX_RETRY_SECONDS)

    async def _write(self, link: Link, stream: Any) -> None:
        link.protocol = str(stream.get_protocol())
        self._gossip.up(link)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_until_closed, stream, nursery.cancel_scope)
                while True:
                    frame = await link.outbox.pop()
                    try:
                        with translated(link.peer, "writing gossip", _WRITE_SECONDS):
                            await stream.write(frame)
                    except TransportError as error:
                        logger.debug("%s", error)
                        nursery.cancel_scope.cancel()
        finally:
            self._gossip.down(link)
            await finish(stream, clean=False)

    async def publish(self, topic: str, data: bytes) -> int:
        """Send a message to the mesh, waiting for room. Returns to how many peers it went. Raises ValueError."""
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(data)} bytes; peers take {MAX_MESSAGE} at most")
        frame, links = self._gossip.own_message(self._author.message(topic, data))
        sent = 0
        deadline = trio.current_time() + _PUBLISH_SECONDS
        for link in links:
            with trio.CancelScope(deadline=deadline) as waiting:
                await link.outbox.room(frame)
            if link.writable:
                if link.outbox.push(frame):
                    sent += 1
                elif waiting.cancelled_caught:
                    logger.warning("%s takes no messages: disconnecting it", link.peer)
                    self._drop(link.peer)
        await trio.lowlevel.checkpoint()
        return sent

    # Reading

    async def handle(self, stream: Any) -> None:
        """Read a gossip stream that a peer opened, until it ends. A newer one of the same peer takes its place."""
        link = self._gossip.links.get(str(stream.muxed_conn.peer_id))
        if link is None:  # its connection is only just being registered: it will try again
            await finish(stream, clean=False)
            return
        if link.reading is not None:
            link.reading.cancel()
        with trio.CancelScope() as scope:
            link.reading = scope
            try:
                await self._read(link, Reader(stream))
            except Malformed as error:
                self._gossip.marks[link.peer].invalid += 1
                self._misbehaved(link.peer, str(error))
            except Exception as error:  # noqa: BLE001  libp2p's streams raise many kinds
                logger.debug("the gossip stream of %s ended: %r", link.peer, error)
            finally:
                await finish(stream, clean=False)
        if link.reading is scope:
            link.reading = None
            link.topics.clear()
            self._gossip.silent(link)

    async def _read(self, link: Link, reader: Reader) -> None:
        while True:
            await reader.wait()
            with trio.fail_after(_FRAME_SECONDS):
                try:
                    length = await reader.varint()
                except ValueError as error:
                    raise Malformed(str(error)) from None
                if length > MAX_RPC:
                    raise Malformed(f"a gossip frame of {length} bytes")
                frame = await reader.exactly(length)
            if self._gossip.marks.score(link.peer) < scores.GRAYLIST:
                if not link.scolded:
                    link.scolded = True
                    self._misbehaved(link.peer, "still sends gossip after too many bad messages")
                continue
            await self._frame(link, frame)

    async def _frame(self, link: Link, frame: bytes) -> None:
        rpc = parse(frame)
        try:
            for option in rpc.subscriptions[:_MAX_SUBSCRIPTIONS]:
                self._gossip.subscription(link, option.topicid, option.subscribe)
            for message in rpc.publish:
                self._gossip.receive(link, message)
                await trio.lowlevel.checkpoint()  # a full frame is many signatures
                if self._gossip.marks.score(link.peer) < scores.GRAYLIST:
                    return
            if rpc.HasField("control"):
                self._gossip.control(link, rpc.control)
        except Malformed:
            raise
        except Exception as error:  # a field that cannot be read, or a fault here: either way only this peer pays
            logger.debug("a gossip frame of %s", link.peer, exc_info=True)
            raise Malformed(f"a gossip frame that cannot be handled ({type(error).__name__})") from error


async def _until_closed(stream: Any, scope: trio.CancelScope) -> None:
    """Nothing comes on this stream; when it ends, so does the writing."""
    try:
        while await stream.read(1024):
            pass
    except Exception as error:  # noqa: BLE001  libp2p's streams raise many kinds
        logger.debug("a gossip stream was closed: %r", error)
    scope.cancel()
