"""Names of nodes: libp2p peer ids of Ed25519 keys, which hold the public key itself."""

import base58

KEY_BYTES = 32
"""Bytes in an Ed25519 public key."""

_PREFIX = b"\x00\x24\x08\x01\x12\x20"
"""An identity multihash of 36 bytes; in it the protobuf of a public key of type Ed25519 and 32 bytes."""

_LENGTH = 52
"""Characters in every such id: the fixed prefix leaves no room for more or fewer."""

_SHOWN = 8


def peer_id_of(public_key: bytes) -> str:
    """The peer id of a public key of 32 bytes. Raises ValueError for any other length."""
    if len(public_key) != KEY_BYTES:
        raise ValueError(f"an Ed25519 public key has {KEY_BYTES} bytes, not {len(public_key)}")
    return str(base58.b58encode(_PREFIX + public_key), "ascii")


def public_key_of(peer_id: str) -> bytes:
    """The 32 bytes of the public key in a peer id. Raises ValueError if it is no id of an Ed25519 key."""
    if len(peer_id) != _LENGTH:
        raise ValueError(f"a peer id has {_LENGTH} characters, not {len(peer_id)}")
    try:
        data = bytes(base58.b58decode(peer_id))
    except ValueError as error:
        raise ValueError(f"not a peer id: {error}") from error
    if len(data) != len(_PREFIX) + KEY_BYTES or not data.startswith(_PREFIX):
        raise ValueError("a peer id, but not of an Ed25519 key")
    return data[len(_PREFIX) :]


def short(peer_id: str) -> str:
    """The end of a peer id, to tell nodes apart on a screen; all begin alike."""
    return peer_id[-_SHOWN:]
