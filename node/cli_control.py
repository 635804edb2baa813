"""The commands that ask something of the running node. `node.cli` has them beside its own."""

from typing import Annotated

import typer

from node.cli_options import LOOK, RUN, DataDirOption, JsonOption

commands = typer.Typer()


@commands.command(rich_help_panel=LOOK)
def watch(data_dir: DataDirOption = None, json: JsonOption = False) -> None:
    """Follow the running node: a line a round, and what it logs. Ctrl-C ends the watching, not the node."""
    from node.commands.controlling import watch
    from node.commands.flags import data_dir_of

    watch(data_dir_of(data_dir), json)


@commands.command(rich_help_panel=RUN)
def pause(
    data_dir: DataDirOption = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until its round is done.")] = True,
) -> None:
    """Let the running node finish its round and begin no other. It stays in its swarm."""
    from node.commands.controlling import pause
    from node.commands.flags import data_dir_of

    pause(data_dir_of(data_dir), wait)


@commands.command(rich_help_panel=RUN)
def resume(data_dir: DataDirOption = None) -> None:
    """Let a paused node go on."""
    from node.commands.controlling import resume
    from node.commands.flags import data_dir_of

    resume(data_dir_of(data_dir))


@commands.command(rich_help_panel=RUN)
def checkpoint(data_dir: DataDirOption = None) -> None:
    """Have the running node save as soon as its round is done."""
    from node.commands.controlling import checkpoint
    from node.commands.flags import data_dir_of

    checkpoint(data_dir_of(data_dir))


@commands.command(rich_help_panel=RUN)
def stop(
    data_dir: DataDirOption = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Until it has ended.")] = True,
) -> None:
    """Have the running node save and end, as Ctrl-C does where it was started."""
    from node.commands.controlling import stop
    from node.commands.flags import data_dir_of

    stop(data_dir_of(data_dir), wait)
