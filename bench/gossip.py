"""How fast batches travel: `python -m bench.gossip [--nodes 2 8 16] [--kb 1 32 256] [--json FILE] [--smoke]`.

Real nodes, each a process with real libp2p connections on loopback, around a ring with six neighbours each: this
project's gossip alone, with the check and the store of a relay, and the whole node with sandbox and pool, beside raw
py-libp2p gossip and raw TCP, which carry the same bytes in the same run. Over TCP nobody passes anything on, so there
each node is connected with all others. Every origin's caps are lifted by settings.

With two nodes the first publishes and the second listens; with more, all of them publish.
"""

import argparse
import json
import sys
from pathlib import Path

from bench.net import report
from bench.net.measuring import measure
from bench.net.runs import RunFailed


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8, 16], choices=[2, 8, 16])
    parser.add_argument("--kb", type=int, nargs="+", default=[1, 32, 256], choices=[1, 32, 256], help="size of a batch")
    parser.add_argument("--repeats", type=int, default=3, help="of what is as fast as it goes")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw them into this PNG")
    parser.add_argument("--smoke", action="store_true", help="two nodes, one size, few batches")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.nodes, arguments.kb, arguments.repeats = [2], [32], 1
    try:
        found = measure(arguments.nodes, arguments.kb, arguments.repeats, arguments.smoke, say)
    except RunFailed as error:
        sys.exit(f"bench.gossip: {error}")
    report.show(found)
    if arguments.plot:
        report.draw(found, arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
