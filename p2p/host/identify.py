"""Learning what a peer says of itself: libp2p's identify and identify push, with bounds on how much it may say."""

import logging
from typing import Any

import trio
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.update import update_peerstore_from_identify

from p2p.host.settings import STREAM_SECONDS
from p2p.host.streams import Reader, finish

logger = logging.getLogger(__name__)

PROTOCOL = "/ipfs/id/1.0.0"
PUSH_PROTOCOL = "/ipfs/id/push/1.0.0"
_MAX_BYTES = 64 * 1024
_MAX_ADDRESSES = 32
_MAX_PROTOCOLS = 128
_MAX_NAME = 256


async def learn(peerstore: Any, peer_id: Any, stream: Any) -> bytes:
    """Read one message into the peer store. Returns the address under which the peer sees this node, or nothing.

    Raises ValueError, EOFError, trio.TooSlowError, and what libp2p raises.
    """
    reader = Reader(stream)
    with trio.fail_after(STREAM_SECONDS):
        length = await reader.varint()
        if length > _MAX_BYTES:
            raise ValueError(f"an identify message of {length} bytes")
        said = Identify()
        said.ParseFromString(await reader.exactly(length))
    kept = Identify(
        listen_addrs=said.listen_addrs[:_MAX_ADDRESSES],
        protocols=[name for name in said.protocols[:_MAX_PROTOCOLS] if len(name) <= _MAX_NAME],
    )
    await update_peerstore_from_identify(peerstore, peer_id, kept)
    return bytes(said.observed_addr)


async def handle_push(peerstore: Any, stream: Any) -> None:
    """Take what a peer says unasked."""
    peer_id = stream.muxed_conn.peer_id
    try:
        await learn(peerstore, peer_id, stream)
    except Exception as error:  # noqa: BLE001  garbage raises what it likes, and costs this stream only
        logger.debug("identify push of %s: %r", peer_id, error)
    finally:
        await finish(stream, clean=True)
