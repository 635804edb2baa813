"""Circuit relay v2: being reached through a relay, reaching others through one, and being one.

Spoken is the protocol of libp2p's specification, with its protobuf messages. py-libp2p's own implementation is not
used: it does not dial, and it does not bound what a relay carries.

A relayed connection is secured end to end, so that a relay sees neither what is sent nor can it pose as anybody.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import trio
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Limit, PeerId, Reservation, Status, StopMessage

from p2p.addresses import Address, parse_address
from p2p.host.host import Host
from p2p.host.network import parse_peer
from p2p.host.settings import DIAL_SECONDS
from p2p.host.tunnel import Pipe, tunnelled
from p2p.peerbook import Say
from p2p.transport import TransportError

logger = logging.getLogger(__name__)

HOP, STOP = "/libp2p/circuit/relay/0.2.0/hop", "/libp2p/circuit/relay/0.2.0/stop"

RESERVATION_SECONDS = 3600
MAX_RESERVATIONS = 64
MAX_CIRCUITS = 64
PEER_CIRCUITS = 16
"""Circuits that begin or end at one peer. A node behind a NAT has all its connections so."""

CIRCUIT_SECONDS = 6 * 3600.0
CIRCUIT_BYTES = 2**30
"""What one circuit carries; then it is closed, and the nodes may connect anew."""

RETRY_FIRST, RETRY_MOST = 5.0, 120.0
_CHUNK = 64 * 1024


class RelayClient:
    """Keeps a place at each relay of the configuration, and connects through any."""

    def __init__(self, host: Host, relays: Sequence[str], say: Say) -> None:
        self._host = host
        self._relays = [parse_address(text) for text in relays]
        self._say = say
        self._reserved: set[str] = set()
        host.circuit = self.connect
        host.libp2p.set_stream_handler(STOP, self._stop)

    async def run(self) -> NoReturn:
        """Reserve and renew until cancelled."""
        async with trio.open_nursery() as nursery:
            for relay in self._relays:
                nursery.start_soon(self._keep, relay)
            await trio.sleep_forever()
        raise AssertionError("the sleep above never ends")

    async def _keep(self, relay: Address) -> NoReturn:
        pause, said = RETRY_FIRST, False
        while True:
            try:
                seconds = await self._reserve(relay)
            except TransportError as error:
                if not said:
                    self._say("warning", f"relay {relay} gives no place, and is asked again and again: {error}")
                said = True
                await trio.sleep(pause)
                pause = min(2 * pause, RETRY_MOST)
                continue
            if said or pause == RETRY_FIRST:
                self._say("info", f"reachable through relay {relay}")
            pause, said = 2 * RETRY_FIRST, False
            await self._hold(relay, seconds / 2)

    async def _hold(self, relay: Address, seconds: float) -> None:
        """Announce the relayed address until it is time to renew, or the relay is gone."""
        peer, through = str(relay.peer), f"{relay}/p2p-circuit"
        self._reserved.add(peer)
        if through not in self._host.announced:
            self._host.announced.append(through)
        until = trio.current_time() + seconds
        try:
            while trio.current_time() < until and self._is_connected(peer):
                await trio.sleep(1.0)
        finally:
            if not self._is_connected(peer):
                self._reserved.discard(peer)
                if through in self._host.announced:
                    self._host.announced.remove(through)

    def _is_connected(self, peer: str) -> bool:
        return bool(self._host.network.live(parse_peer(peer)))

    async def _reserve(self, relay: Address) -> float:
        """Seconds that the place is kept. Raises TransportError."""
        peer = await self._host.connect(str(relay))
        pipe = await self._open(peer, HOP)
        try:
            with trio.fail_after(DIAL_SECONDS):
                await pipe.say(HopMessage(type=HopMessage.RESERVE))
                answer = await pipe.message(HopMessage)
        except trio.TooSlowError:
            raise TransportError("it does not answer") from None
        finally:
            await pipe.aclose()
        _check(answer)
        return min(max(answer.reservation.expire - time.time(), 60.0), RESERVATION_SECONDS)

    async def _open(self, peer: str, protocol: str) -> Pipe:
        try:
            return Pipe(await self._host._open_stream(peer, (protocol,)))
        except TransportError:
            raise
        except Exception as error:
            raise TransportError(f"{peer[-8:]} does not relay: {str(error) or type(error).__name__}") from error

    async def connect(self, target: str, peer: str) -> None:
        """Connect with `peer` by `<relay>/p2p-circuit`. Raises TransportError, and what libp2p raises."""
        relay = target.removesuffix("/p2p-circuit")
        pipe = await self._open(await self._host.connect(relay), HOP)
        done = False
        try:
            await pipe.say(HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=parse_peer(peer).to_bytes())))
            _check(await pipe.message(HopMessage))
            raw = tunnelled(pipe, target, initiator=True)
            await self._host.network.upgrade_outbound_raw_conn(raw, parse_peer(peer))
            done = True
        finally:
            if not done:
                await pipe.aclose()

    async def _stop(self, stream: Any) -> None:
        """A relay brings somebody."""
        pipe, relay = Pipe(stream), str(stream.muxed_conn.peer_id)
        try:
            if relay not in self._reserved:
                raise TransportError("a relay without a reservation")
            with trio.fail_after(DIAL_SECONDS):
                message = await pipe.message(StopMessage)
                if message.type != StopMessage.CONNECT:
                    raise TransportError("not a connection")
                await pipe.say(StopMessage(type=StopMessage.STATUS, status=Status.OK))
            raw = tunnelled(pipe, f"/p2p/{relay}/p2p-circuit", initiator=False)
            await self._host.network.upgrade_inbound_raw_conn(raw, None)
            await pipe.closed.wait()
        except (TransportError, trio.TooSlowError) as error:
            logger.debug("a connection through relay %s failed: %r", relay, error)
        finally:
            await pipe.aclose()


class RelayServer:
    """Relays for others, within bounds. Whoever may connect to this node may use it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._places: dict[str, float] = {}
        self._ends: Counter[str] = Counter()
        self.circuits = 0
        host.libp2p.set_stream_handler(HOP, self._hop)

    async def _hop(self, stream: Any) -> None:
        pipe, peer = Pipe(stream), str(stream.muxed_conn.peer_id)
        try:
            with trio.fail_after(DIAL_SECONDS):
                message = await pipe.message(HopMessage)
            if message.type == HopMessage.RESERVE:
                await pipe.say(self._place(peer))
            elif message.type == HopMessage.CONNECT:
                await self._carry(peer, pipe, message)
            else:
                await pipe.say(_status(Status.UNEXPECTED_MESSAGE))
        except (TransportError, trio.TooSlowError, trio.BrokenResourceError) as error:
            logger.debug("relaying for %s: %r", peer, error)
        finally:
            await pipe.aclose()

    def _place(self, peer: str) -> Any:
        now = trio.current_time()
        self._places = {
            name: until
            for name, until in self._places.items()
            if until > now and self._host.network.live(parse_peer(name))
        }
        if self._is_relayed(peer):
            return _status(Status.PERMISSION_DENIED)
        if peer not in self._places and len(self._places) >= MAX_RESERVATIONS:
            return _status(Status.RESERVATION_REFUSED)
        self._places[peer] = now + RESERVATION_SECONDS
        answer = _status(Status.OK)
        answer.reservation.CopyFrom(Reservation(expire=int(time.time()) + RESERVATION_SECONDS))
        answer.limit.CopyFrom(_LIMIT)
        return answer

    def _is_relayed(self, peer: str) -> bool:
        conns = self._host.network.live(parse_peer(peer))
        return all("p2p-circuit" in str(one) for conn in conns for one in conn.get_transport_addresses())

    async def _carry(self, source: str, pipe: Pipe, message: Any) -> None:
        try:
            target = str(ID(message.peer.id))
        except Exception as error:
            raise TransportError("no peer id") from error
        if self._places.get(target, 0.0) < trio.current_time() or not self._host.network.live(parse_peer(target)):
            await pipe.say(_status(Status.NO_RESERVATION))
            return
        if self.circuits >= MAX_CIRCUITS or max(self._ends[source], self._ends[target]) >= PEER_CIRCUITS:
            await pipe.say(_status(Status.RESOURCE_LIMIT_EXCEEDED))
            return
        self.circuits += 1
        self._ends.update((source, target))
        try:
            await self._bridge(source, target, pipe)
        finally:
            self.circuits -= 1
            self._ends.subtract((source, target))
            self._ends = +self._ends

    async def _bridge(self, source: str, target: str, pipe: Pipe) -> None:
        try:
            other = await self._bring(source, target)
        except TransportError:
            await pipe.say(_status(Status.CONNECTION_FAILED))
            raise
        try:
            accepted = _status(Status.OK)
            accepted.limit.CopyFrom(_LIMIT)
            await pipe.say(accepted)
            with trio.move_on_after(CIRCUIT_SECONDS):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_pump, pipe, other, nursery.cancel_scope)
                    nursery.start_soon(_pump, other, pipe, nursery.cancel_scope)
        finally:
            await other.aclose()

    async def _bring(self, source: str, target: str) -> Pipe:
        """Ask `target` to take a connection from `source`. Raises TransportError."""
        pipe: Pipe | None = None
        agreed = False
        try:
            with trio.fail_after(DIAL_SECONDS):
                pipe = Pipe(await self._host._open_stream(target, (STOP,)))
                by = PeerId(id=parse_peer(source).to_bytes())
                await pipe.say(StopMessage(type=StopMessage.CONNECT, peer=by, limit=_LIMIT))
                answer = await pipe.message(StopMessage)
            agreed = answer.type == StopMessage.STATUS and answer.status == Status.OK
        except Exception as error:
            raise TransportError(f"{target[-8:]} takes no connection: {type(error).__name__} {error}") from error
        finally:
            if pipe is not None and not agreed:
                await pipe.aclose()
        if not agreed:
            raise TransportError(f"{target[-8:]} takes no connection")
        return pipe


async def _pump(source: Pipe, sink: Pipe, both: trio.CancelScope) -> None:
    """Carry bytes one way; the end of one way is the end of both."""
    left = CIRCUIT_BYTES
    try:
        while left > 0 and (data := await source.receive_some(_CHUNK)):
            await sink.send_all(data)
            left -= len(data)
    except trio.BrokenResourceError:
        logger.debug("a circuit has ended")
    both.cancel()


_LIMIT = Limit(duration=int(CIRCUIT_SECONDS), data=CIRCUIT_BYTES)


def _status(status: Any) -> Any:
    return HopMessage(type=HopMessage.STATUS, status=status)


def _check(answer: Any) -> None:
    """Raises TransportError unless a relay agrees."""
    if answer.type != HopMessage.STATUS or answer.status != Status.OK:
        raise TransportError(f"the relay says {Status.Name(answer.status) if answer.status else 'nothing of use'}")
