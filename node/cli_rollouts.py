"""`swarmnode rollouts`: the pool, out of a node and into one."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from node.cli_options import DataDirOption, SetOption

commands = typer.Typer(no_args_is_help=True, help="Take rollouts out of the pool for other programs, or bring them in.")


@commands.command("export")
def export_rollouts(
    file: Annotated[Path, typer.Argument(help="File to write.")],
    data_dir: DataDirOption = None,
    form: Annotated[
        Literal["jsonl", "parquet"], typer.Option("--format", help="parquet needs the extra of that name.")
    ] = "jsonl",
    since_round: Annotated[int, typer.Option("--since-round", min=0, help="What came from that round on.")] = 0,
    origin: Annotated[
        str | None, typer.Option("--origin", help="Of this peer id alone; `own` is this node.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write the groups in the pool, with rewards and advantages, a row each. Works while the node runs.

    \b
    swarmnode rollouts export mine.jsonl --origin own --since-round 100
    swarmnode rollouts export all.parquet --format parquet
    """
    from node.commands.flags import data_dir_of
    from node.commands.rollouts import write_pool

    write_pool(data_dir_of(data_dir), file, form, since_round, origin, force)


@commands.command("import")
def import_rollouts(
    file: Annotated[Path, typer.Argument(help="JSON lines, as `rollouts export` writes them.")],
    data_dir: DataDirOption = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Their origin is import:NAME; by default the file's name.", show_default=False),
    ] = None,
    settings: SetOption = None,
) -> None:
    """Bring groups into the pool, through the checks of what peers send. The node must not run meanwhile."""
    from node.commands.flags import load_run_with_flags
    from node.commands.rollouts import import_file

    import_file(load_run_with_flags(None, settings, data_dir=data_dir), file, name)
