"""The DHT of real hosts on loopback, and what a peer can do to it."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.kad_dht.utils import sort_peer_ids_by_distance
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import create_signed_peer_record
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.utils import encode_varint_prefixed
from multiaddr import Multiaddr

from p2p.discovery import Finder
from p2p.host import dht as dht_module
from p2p.host import run_finding
from p2p.host.dht import MAX_ADDRESSES, MAX_PROVIDERS, MAX_RECORDS, PEER_STREAMS, Dht, key_of
from p2p.peerbook import PeerBook
from p2p.settings import NetworkSettings
from p2p.transport import Connection, TransportError
from tests.p2p.hosts import Node, running, until


@asynccontextmanager
async def star(size: int) -> AsyncIterator[list[Node]]:
    """Nodes that are all connected with the first, and know what it speaks."""
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(running()) for _ in range(size)]
        for node in nodes[1:]:
            await node.host.connect(nodes[0].address)
        yield nodes


async def ask(node: Node, victim: Node, *messages: Any) -> list[Any]:
    """Send messages on one stream of the DHT; returns the answers until the stream ends."""
    stream = await node.host._open_stream(victim.host.peer_id, (str(PROTOCOL_ID),))
    answers = []
    try:
        for message in messages:
            await stream.write(encode_varint_prefixed(message.SerializeToString()))
            answers.append(await read_message(stream))
    except Exception:  # noqa: BLE001  the end of the stream, in whatever way
        return answers
    finally:
        await stream.reset()
    return answers


async def test_nodes_that_know_one_find_all_of_their_swarm_and_none_of_another() -> None:
    async with star(5) as nodes:
        tables = [Dht(node.host, "other" if node is nodes[4] else "main", 64) for node in nodes]
        for table in tables:
            await table.look()
        found = {address.rpartition("/")[2] for address in await tables[1].look()}
        assert found == {nodes[number].host.peer_id for number in (0, 2, 3)}
        assert not any(node.watcher.offences for node in nodes)


async def test_values_and_providers_of_other_keys_are_not_kept() -> None:
    async with star(2) as (victim, evil):
        table = Dht(victim.host, "main", 64)
        put = Message(type=Message.PUT_VALUE, key=b"/pk/x")
        put.record.key, put.record.value = b"/pk/x", b"v" * 1000
        assert await ask(evil, victim, put) == []
        put.key = put.record.key = b"no namespace"
        assert await ask(evil, victim, put) == []
        assert table._kad.value_store.size() == 0
        for key, kept in ((key_of("other"), 0), (key_of("main"), 1)):
            provide = Message(type=Message.ADD_PROVIDER, key=key)
            provider = provide.providerPeers.add()
            provider.id = evil.host.libp2p.get_id().to_bytes()
            provider.addrs.append(evil.host.libp2p.get_addrs()[0].to_bytes())
            for asked in (key_of("main"), key):
                get = Message(type=Message.GET_PROVIDERS, key=asked)
                answers = await ask(evil, victim, provide, get)
                assert len(answers[1].providerPeers) == kept


async def test_garbage_silence_and_floods_end_their_stream_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_module, "STREAM_SECONDS", 0.5)
    async with star(2) as (victim, evil):
        table = Dht(victim.host, "main", 64)
        find = Message(type=Message.FIND_NODE, key=victim.host.libp2p.get_id().to_bytes())
        assert 0 < len(await ask(evil, victim, *[find] * 200)) < 100
        for garbage in (b"\xff" * 20, b"\x80\x94\xeb\xdc\x03 a gigabyte", b"\x04\xff\xff\xff\xff"):
            stream = await evil.host._open_stream(victim.host.peer_id, (str(PROTOCOL_ID),))
            await stream.write(garbage)
        await until(lambda: not table._open)
        most = 0
        for _ in range(3 * PEER_STREAMS):
            with suppress(MultiselectClientError):  # those beyond are reset at once
                await evil.host._open_stream(victim.host.peer_id, (str(PROTOCOL_ID),))
            most = max(most, table._open.total())
        assert most == PEER_STREAMS
        await until(lambda: not table._open)
        assert len(await ask(evil, victim, find)) == 1


async def test_the_number_of_providers_is_bounded() -> None:
    async with running() as node:
        store = Dht(node.host, "main", 64)._kad.provider_store
        peers = [
            ID.from_pubkey(create_new_key_pair(n.to_bytes(32, "big")).public_key) for n in range(2 * MAX_PROVIDERS)
        ]
        for peer in peers:
            store.add_provider(key_of("main"), PeerInfo(peer, []))
        assert len(store._known[key_of("main")]) == MAX_PROVIDERS
        assert len(store.get_providers(key_of("main"))) == 20
        shards = Dht(node.host, "main", 64, shards=40, heard=[3, 4])._kad.provider_store
        shards.add_provider(key_of("main", 39), PeerInfo(peers[0], []))
        for shard in range(39):
            for peer in peers[:MAX_PROVIDERS]:
                shards.add_provider(key_of("main", shard), PeerInfo(peer, []))
        assert sum(map(len, shards._known.values())) == MAX_RECORDS
        assert len(shards.get_providers(key_of("main", 39))) == 1, "few of one key do not give way to many of others"


async def read_message(stream: Any) -> Any:
    length = shift = 0
    while True:
        byte = (await stream.read(1))[0]
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    body = b""
    while len(body) < length:
        body += await stream.read(length - len(body))
    message = Message()
    message.ParseFromString(body)
    return message


SILENT: bytes = Multiaddr("/ip4/192.0.2.1/tcp/4747").to_bytes()
ANSWERS: dict[str, Callable[[Any, Any], None]] = {
    "made-up ids near the key": lambda asked, answer: [  # type: ignore[dict-item]
        answer.closerPeers.add(id=made_up.to_bytes())
        for made_up in sort_peer_ids_by_distance(asked.key, [ID(b"%x" % n) for n in range(3000)])
    ],
    "made-up providers": lambda asked, answer: [  # type: ignore[dict-item]
        answer.providerPeers.add(
            id=ID.from_pubkey(create_new_key_pair(n.to_bytes(32, "big")).public_key).to_bytes(), addrs=[SILENT] * 8
        )
        for n in range(300)
    ],
}


@pytest.mark.parametrize("what", [*ANSWERS, "silence"])
async def test_one_that_answers_nonsense_does_not_hide_the_others(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_module, "WALK_SECONDS", 0.5)
    monkeypatch.setattr(dht_module, "LOOKUP_SECONDS", 1.0)

    async def answer(stream: Any) -> None:
        with suppress(Exception):
            while True:
                asked = await read_message(stream)
                if what == "silence":
                    await trio.sleep_forever()
                given = Message(type=asked.type, key=asked.key)
                ANSWERS[what](asked, given)
                await stream.write(encode_varint_prefixed(given.SerializeToString()))

    async with running() as victim, running() as evil, running() as honest:
        table, other = Dht(victim.host, "main", 64), Dht(honest.host, "main", 64)
        evil.host.libp2p.set_stream_handler(PROTOCOL_ID, answer)
        for node in (evil, honest):
            await victim.host.connect(node.address)
        await other.look()
        assert honest.host.peer_id in {address.rpartition("/")[2] for address in await table.look()}
        assert [victim.host.peer_id, honest.host.peer_id] == [*other._kad.provider_store._known[key_of("main")]][::-1]


async def test_nobody_has_this_node_dial_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is connected with a node there: then others that are there are found too."""
    inward = ["/ip4/127.0.0.1", "/ip4/127.9.9.9", "/ip4/0.0.0.0", "/ip6/::1", "/ip6/::ffff:127.0.0.1"]
    async with star(2) as (victim, _):
        table = Dht(victim.host, "main", 64)
        name = ID.from_pubkey(create_new_key_pair(bytes(32)).public_key)
        told = PeerInfo(name, [Multiaddr(f"{host}/tcp/4747") for host in inward])
        assert len([*table._addresses([told])]) == len(inward)
        dialled: list[str] = []
        monkeypatch.setattr(victim.host, "connections", lambda: [Connection("a", "/ip4/192.0.2.7/tcp/4747", True, 9.0)])
        monkeypatch.setattr(victim.host, "connect", dialled.append)
        assert [*table._addresses([told])] == []
        table._view._store.add_addrs(name, told.addrs, 3600)
        table._view.dials = 1
        with pytest.raises(TransportError, match="not reachable"):
            await table._view.new_stream(name, [])
        assert dialled == []


async def test_a_record_of_thousands_of_addresses_is_not_kept() -> None:
    async with star(2) as (victim, evil):
        table = Dht(victim.host, "main", 64)
        name = evil.host.libp2p.get_id()
        many = [Multiaddr(f"/ip4/10.0.{number >> 8}.{number & 255}/tcp/4747") for number in range(1500)]
        record = create_signed_peer_record(name, many, evil.host.libp2p.get_private_key()).marshal_envelope()
        find = Message(type=Message.FIND_NODE, key=name.to_bytes(), senderRecord=record)
        assert len(await ask(evil, victim, find)) == 1
        table._view._store.add_addrs(name, many, 3600)
        for address in many:
            table._view._store.add_addrs(name, [address], 3600)
        assert len(table._view._store.addrs(name)) == MAX_ADDRESSES
        assert table._view._store.get_peer_record(name) is None


async def test_nodes_find_those_of_the_shards_that_they_hear() -> None:
    async with star(5) as nodes:
        heard = [[0, 1], [1, 2], [2, 3], [5, 6], [1, 2]]
        tables = [Dht(node.host, "main", 64, 8, shards) for node, shards in zip(nodes, heard, strict=True)]
        for table in tables:
            await table.look()
        found = {address.rpartition("/")[2] for address in await tables[1].look()}
        assert found == {nodes[number].host.peer_id for number in (0, 2, 4)}
        assert await tables[3].look() == []
        assert not any(node.watcher.offences for node in nodes)


async def test_a_look_up_does_not_take_the_places_of_nodes_that_are_looked_for() -> None:
    async with star(6) as nodes:
        tables = [Dht(node.host, "main", 6, 8, [0]) for node in nodes]
        for table in tables:
            await table.look()
        await tables[5].look()
        assert len(nodes[5].host.connections()) <= 3


async def test_a_node_that_joins_one_is_connected_with_the_others_through_the_dht(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dht_module, "FIRST_SECONDS", 0.2)
    async with running() as hub, running() as first, running() as second, trio.open_nursery() as nursery:
        for node in (hub, first, second):
            settings = NetworkSettings(join=[] if node is hub else [hub.address], mdns=False, upnp=False)
            finder = Finder(node.host, settings, PeerBook(None, print), print)
            nursery.start_soon(finder.run)
            nursery.start_soon(run_finding, node.host, settings, finder.found, print)
        await until(lambda: all(len(node.host.connections()) == 2 for node in (hub, first, second)))
        nursery.cancel_scope.cancel()


async def test_an_address_without_a_peer_id_leads_to_whoever_answers() -> None:
    async with running() as one, running() as other:
        place = other.address.partition("/p2p/")[0]
        assert await one.host.connect(place) == other.host.peer_id
        assert [connection.peer for connection in one.host.connections()] == [other.host.peer_id]
        own = one.address.partition("/p2p/")[0]
        assert await one.host.connect(own) == one.host.peer_id
        assert len(one.host.connections()) == 1
        with pytest.raises(TransportError, match="known"):
            await one.host.connect("/ip4/127.0.0.1/tcp/1")
        assert not one.watcher.offences + other.watcher.offences
