"""`identity.key`."""

from node.identity import Identity, IdentityError
from tests.fuzz.scratch import directory

PATH = directory() / "identity.key"


def seeds() -> list[bytes]:
    PATH.unlink(missing_ok=True)
    Identity.load_or_create(PATH)
    return [PATH.read_bytes()]


def run(data: bytes) -> None:
    PATH.write_bytes(data)
    PATH.chmod(0o600)
    try:
        identity = Identity.load(PATH)
    except IdentityError as error:
        assert len(str(error)) < 1000
        return
    assert len(identity.public_bytes) == 32
