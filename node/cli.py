"""The command line."""


def main() -> None:
    """Entry point of `swarmnode`."""
    raise SystemExit("not yet")
