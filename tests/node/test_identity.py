"""The node's key is made once, kept from others, and never replaced by itself."""

import re
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from node.identity import Identity, IdentityError
from p2p.ids import public_key_of


def test_it_is_made_once_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    made = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Identity.load_or_create(path)
    assert again.public_bytes == made.public_bytes
    assert again.node_id == made.node_id
    assert re.fullmatch("12D3KooW[1-9A-HJ-NP-Za-km-z]{44}", made.node_id)
    assert public_key_of(made.node_id) == made.public_bytes
    assert len(made.public_bytes) == 32
    assert Identity.load_or_create(tmp_path / "other.key").node_id != made.node_id
    made.key.public_key().verify(again.key.sign(b"text"), b"text")


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.load_or_create(path)


def test_a_broken_key_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    other_kind = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for content in (b"", b"-----BEGIN PRIVATE KEY-----\n", other_kind):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(IdentityError, match="is not an Ed25519 key"):
            Identity.load_or_create(path)
        assert path.read_bytes() == content
