"""Environment variables and flags, a line each."""

from node.config_sources import PREFIX, load, parse_flag
from node.errors import ConfigError


def seeds() -> list[bytes]:
    return [
        b"SWARMNODE_TRAINING__LR=1e-5\n--model.name=tiny\n--sharing.share=0.5",
        b'SWARMNODE_TASKS__MIX=[{"verifier": "reasoning_gym", "config": {"dataset": "gcd"}, "weight": 2}]',
        b'--verifiers.commands={"x": {"argv": ["/bin/true"], "version": "1"}}\n--node.seed=none',
        b'--network.join=["/ip4/203.0.113.7/tcp/4747"]\n--tasks.mix.0.weight=2\nSWARMNODE_PORT_1_TCP=x',
    ]


def run(data: bytes) -> None:
    environ, flags = {}, []
    try:
        # As the operating system hands them over: no NUL, and bytes that are not UTF-8 as lone surrogates.
        for line in data.replace(b"\0", b"").decode("utf-8", "surrogateescape").splitlines():
            if line.startswith("--"):
                flags.append(parse_flag(line[2:]))
            else:
                name, _, value = line.partition("=")
                environ[PREFIX + name.removeprefix(PREFIX)] = value
        environ.pop("SWARMNODE_CONFIG", None)
        loaded = load(flags, environ=environ)
    except ConfigError as error:
        assert str(error)
        return
    list(loaded.settings())
