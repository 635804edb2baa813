"""Who answers at an address that does not say so: noise proves it to whoever connects."""

from typing import Any

import trio
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from p2p.host.network import Network
from p2p.host.settings import DIAL_SECONDS
from p2p.transport import TransportError


async def peer_at(network: Network, address: str) -> str:
    """The peer id of the node at a numeric multiaddr without one. Raises TransportError.

    The connection is closed again: libp2p dials a peer, not a place, so the caller dials anew by what it has learnt.
    """

    raw: Any = None
    try:
        with trio.fail_after(DIAL_SECONDS):
            raw = await network.transport_manager.get_transports()[0].dial(Multiaddr(address))
            secured = await network.upgrader.security_multistream.secure_outbound(raw, None)
            return str(secured.get_remote_peer())
    except MultiaddrError as error:
        raise TransportError(f"{address} is not a multiaddr: {error}") from error
    except trio.TooSlowError:
        raise TransportError(f"{address} did not answer within {DIAL_SECONDS:.0f} s") from None
    except Exception as error:
        raise TransportError(f"nobody to be known at {address}: {str(error) or type(error).__name__}") from error
    finally:
        if raw is not None:
            with trio.CancelScope(shield=True), trio.move_on_after(1.0):
                await raw.close()
