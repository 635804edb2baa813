"""Addresses that others tell of."""

from p2p.addresses import parse_address
from tests.p2p.forging import peer


def seeds() -> list[bytes]:
    return [
        text.encode()
        for text in (
            f"/ip4/203.0.113.7/tcp/4747/p2p/{peer(1)}",
            f"/ip6/2001:db8::1/tcp/65535/p2p/{peer(1)}/p2p-circuit/p2p/{peer(2)}",
            "/dns4/node.example.org/tcp/4747",
        )
    ]


def run(data: bytes) -> None:
    try:
        address = parse_address(data.decode("utf-8", "surrogateescape"))
    except ValueError as error:
        assert len(str(error)) < 10_000
        return
    assert parse_address(str(address)) == address
    assert str(address).isascii()
