"""Keeps libp2p's own logging off the terminal: it logs what any peer can provoke, and partly to the root logger."""

import logging

from libp2p.network.connection import swarm_connection

_OWN = logging.getLogger("p2p.libp2p")


class _Relay(logging.Handler):
    """Passes libp2p's warnings on under this package's name, one line each, at a level that peers cannot abuse."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log the first line at DEBUG."""
        if _OWN.isEnabledFor(logging.DEBUG):
            text = record.getMessage().partition("\n")[0][:300]
            _OWN.debug("%s: %s: %s", record.name, record.levelname.lower(), text)


def quiet() -> None:
    """Route libp2p's records from WARNING up to the logger `p2p.libp2p`, at DEBUG, and nowhere else."""
    logger = logging.getLogger("libp2p")
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    if not any(isinstance(handler, _Relay) for handler in logger.handlers):
        logger.addHandler(_Relay())
    # This module calls logging.debug() and friends, which install a handler on the root logger.
    logging.getLogger("multiaddr").setLevel(logging.WARNING)
    swarm_connection.logging = logging.getLogger("libp2p.network.connection")
