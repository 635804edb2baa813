"""Addresses as people type them."""

import pytest

from p2p.addresses import check_addresses, parse_address
from p2p.ids import peer_id_of
from p2p.settings import NetworkSettings

ONE, TWO = peer_id_of(bytes(31) + b"\x01"), peer_id_of(bytes(31) + b"\x02")


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/127.0.0.1/tcp/4747",
        f"/ip6/::1/tcp/1/p2p/{ONE}",
        f"/dns4/node-1.example.org/tcp/65535/p2p/{ONE}",
        "/dns/node/tcp/4747",
        f"/ip4/203.0.113.7/tcp/4747/p2p/{ONE}/p2p-circuit/p2p/{TWO}",
    ],
)
def test_an_address_is_read_and_written_alike(text: str) -> None:
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "write /ip4/"),
        ("127.0.0.1:4747", "write /ip4/"),
        ("/ip4/127.0.0.1/udp/4747/quic-v1", "write /ip4/"),
        ("/ip4/127.0.0.1/tcp/4747\n", "write /ip4/"),
        ("/ip4/127.0.0.300/tcp/4747", "127.0.0.300"),
        ("/ip6/fe80::1%eth0/tcp/4747", "zone"),
        ("/ip4/127.0.0.1/tcp/65536", "no port 65536"),
        ("/dns4/two words/tcp/1", "not a host name"),
        ("/ip4/127.0.0.1/tcp/4747/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "not a peer id"),
        ("/dns4/" + "a" * 1000 + "/tcp/1", "too long"),
    ],
)
def test_what_is_no_address_is_refused_with_a_reason(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_address(text)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (NetworkSettings(join=["nonsense"]), "join: 'nonsense'"),
        (NetworkSettings(join=["/ip4/10.0.0.1/tcp/0"]), "join: .*port 0"),
        (NetworkSettings(listen=["/dns4/me/tcp/4747"]), "listen: .*IP address"),
        (NetworkSettings(listen=[f"/ip4/0.0.0.0/tcp/0/p2p/{ONE}"]), "listen: .*without /p2p"),
        (NetworkSettings(relay=["/ip4/10.0.0.1/tcp/4747"]), "relay: .*append /p2p/"),
        (NetworkSettings(join=[f"/ip4/10.0.0.1/tcp/1/p2p/{ONE}/p2p-circuit"]), "join: .*whom"),
    ],
)
def test_a_setting_that_cannot_be_used_as_meant_is_named(settings: NetworkSettings, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_addresses(settings)


def test_the_defaults_and_a_free_port_are_fine() -> None:
    check_addresses(NetworkSettings())
    check_addresses(
        NetworkSettings(
            listen=["/ip4/127.0.0.1/tcp/0"], join=["/dns4/node/tcp/4747"], announce=["/dns4/me.example/tcp/4747"]
        )
    )
