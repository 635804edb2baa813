"""The command of those who answer tasks without a model that trains. `node.cli` has it beside its own."""

from typing import Annotated

import typer

from node.cli_options import RUN, DataDirOption, FileOption, JoinOption, ListenOption, SeedOption, SetOption

commands = typer.Typer()


@commands.command(rich_help_panel=RUN)
def contribute(
    data_dir: DataDirOption = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--command", metavar="CMD", help="A program: reads a task on stdin, prints an answer.", show_default=False
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="The program reads a JSON object, not the question alone.")
    ] = False,
    openai: Annotated[
        str | None,
        typer.Option("--openai", metavar="URL", help="An OpenAI-compatible server, as in https://host/v1."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The model to ask there.", show_default=False)] = None,
    key_env: Annotated[
        str, typer.Option("--key-env", metavar="NAME", help="Environment variable with its key.")
    ] = "OPENAI_API_KEY",
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, max=3600, help="Seconds for one answer.")] = 60.0,
    tasks: Annotated[int | None, typer.Option("--tasks", min=1, help="Stop after so many.", show_default=False)] = None,
    at_once: Annotated[int, typer.Option("--at-once", min=1, max=64, help="Answers in the making.")] = 4,
    config: FileOption = None,
    seed: SeedOption = None,
    join: JoinOption = None,
    listen: ListenOption = None,
    swarm: Annotated[str | None, typer.Option("--swarm", help="Name of the swarm.", show_default=False)] = None,
    settings: SetOption = None,
) -> None:
    """Answer tasks instead of training: yourself here, or by a program or a model elsewhere. Others learn from it."""
    from node.commands.contributing import run_contribution
    from node.commands.flags import load_with_flags

    loaded = load_with_flags(
        config, settings, data_dir=data_dir, seed=seed, join=join or None, listen=listen or None, swarm=swarm
    )
    raise typer.Exit(run_contribution(loaded, command, json, openai, model, key_env, timeout, tasks, at_once))
