"""Who this node is: an Ed25519 key, made once and kept in the data directory."""

import stat
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from node.datadir import write_atomically
from node.errors import NodeError
from p2p.ids import peer_id_of


class IdentityError(NodeError):
    """The key file cannot be trusted or read. It is never replaced by itself: that would make another node of this."""


@dataclass(frozen=True)
class Identity:
    """The node's key pair."""

    key: Ed25519PrivateKey

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """The identity in `path`, made if there is no such file. Raises IdentityError, or OSError from writing it."""
        if path.exists():
            return cls.load(path)
        key = Ed25519PrivateKey.generate()
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_atomically(path, pem, mode=0o600)
        return cls(key)

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """The identity in `path`. Raises IdentityError."""
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                raise IdentityError(
                    f"{path} can be read by others (mode {mode:o}): run `chmod 600 {path}`, or delete it for a new"
                    " identity if somebody may have copied it"
                )
            pem = path.read_bytes()
        except OSError as error:
            raise IdentityError(f"{path} cannot be read: {error.strerror}") from error
        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise IdentityError(_broken(path)) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise IdentityError(_broken(path))
        return cls(key)

    @property
    def public_bytes(self) -> bytes:
        """The public key, 32 bytes."""
        return self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @property
    def node_id(self) -> str:
        """The libp2p peer id of the public key: the node's name in the swarm, as origin and in every list."""
        return peer_id_of(self.public_bytes)


def _broken(path: Path) -> str:
    return f"{path} is not an Ed25519 key: restore it from a copy, or delete it for a new identity"
