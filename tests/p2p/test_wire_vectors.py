"""This implementation agrees with the test vectors, step by step, as another one would check itself."""

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.gossip import shard_of
from p2p.ids import peer_id_of
from p2p.wire import encode_batch, open_envelope, seal
from tests.p2p import vectors

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("vectors.json").read_text())
KEY = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(VECTORS["private_key"]))


def test_the_names_follow_from_the_key() -> None:
    public = KEY.public_key().public_bytes_raw()
    assert public.hex() == VECTORS["public_key"]
    assert peer_id_of(public) == VECTORS["peer_id"]
    assert shard_of(VECTORS["peer_id"], VECTORS["shards"]) == VECTORS["shard"]


@pytest.mark.parametrize("name", list(VECTORS["good"]))
def test_good_envelopes_open_and_are_made_alike(name: str) -> None:
    vector = {key: value if key == "batch" else bytes.fromhex(value) for key, value in VECTORS["good"][name].items()}
    opened = open_envelope(vector["envelope"])
    assert opened.id == vector["id"]
    assert opened.origin == VECTORS["peer_id"]
    assert vectors.shown(opened)["batch"] == vector["batch"]
    assert encode_batch(opened.batch) == vector["canonical"] == zlib.decompress(vector["payload"])
    signed = bytes.fromhex(VECTORS["signed_prefix"]) + vector["payload"]
    assert KEY.sign(signed) == vector["signature"]
    public = bytes.fromhex(VECTORS["public_key"])
    assert vector["envelope"] == msgpack.packb([2, public, vector["payload"], vector["signature"]])
    assert vector["id"] == hashlib.sha256(bytes.fromhex(VECTORS["id_prefix"]) + public + vector["canonical"]).digest()
    # Another zlib may compress to other bytes; the id stays.
    assert seal(KEY, opened.batch).id == opened.id


@pytest.mark.parametrize("name", list(VECTORS["bad"]))
def test_bad_envelopes_are_refused_for_their_reason(name: str) -> None:
    vector = VECTORS["bad"][name]
    assert vectors.reason_of(bytes.fromhex(vector["envelope"])) == vector["reason"]


def test_the_vectors_are_those_that_the_script_makes() -> None:
    """Up to compressed bytes, and with them the signatures, which depend on the zlib at hand."""
    made = vectors.vectors()
    assert {name: vector["reason"] for name, vector in made["bad"].items()} == {
        name: vector["reason"] for name, vector in VECTORS["bad"].items()
    }
    for name, vector in made["good"].items():
        for step in ("batch", "canonical", "id"):
            assert vector[step] == VECTORS["good"][name][step]
