"""The command line: what may be typed. What is done about it is in `node.commands`, imported when it is needed."""

import importlib.util
import sys
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated, Literal

try:
    import typer

    from node import cli_contribute, cli_control, cli_rollouts
    from node.cli_options import (
        LOOK,
        MODEL,
        RUN,
        SETUP,
        BestOption,
        DataDirOption,
        EngineOption,
        FileOption,
        JoinOption,
        JsonOption,
        ListenOption,
        ModelOption,
        SeedOption,
        SetOption,
    )
except KeyboardInterrupt:  # most of the time before `main` goes by here
    raise SystemExit(130) from None

from node.errors import NodeError, file_problem

app = typer.Typer(
    name="swarmnode",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=(
        "First time: `swarmnode doctor` looks at this machine, `swarmnode start --silo --model tiny` trains a model of"
        " a few megabytes in minutes, and `swarmnode testnet` shows a swarm on one machine. Each command tells more:"
        " `swarmnode start --help`."
    ),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Train a language model by reinforcement learning, alone or in a swarm of ordinary machines."""


@app.command(rich_help_panel=RUN)
def start(
    silo: Annotated[bool, typer.Option("--silo", help="Train alone, without a network.")] = False,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Stop after this round.", show_default=False)
    ] = None,
    data_dir: DataDirOption = None,
    model: ModelOption = None,
    engine: EngineOption = None,
    config: FileOption = None,
    seed: SeedOption = None,
    join: JoinOption = None,
    listen: ListenOption = None,
    swarm: Annotated[str | None, typer.Option("--swarm", help="Name of the swarm.", show_default=False)] = None,
    relay: Annotated[bool, typer.Option("--relay", help="Only pass on what others send: no model.")] = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")] = False,
    no_tty: Annotated[bool, typer.Option("--no-tty", help="Plain log lines instead of the live view.")] = False,
    settings: SetOption = None,
) -> None:
    """Run the node. It goes on where it was; Ctrl-C saves and ends it.

    \b
    swarmnode start                          with swarmnode.toml, if it is here
    swarmnode start --silo --model tiny      alone, with the packaged model
    swarmnode start --join ADDRESS           `swarmnode id` of a node prints it
    swarmnode start --set training.lr=1e-5   `swarmnode init` has all settings

    While it runs: `swarmnode status`, `watch`, `pause`, `stop`, and the dashboard whose address it prints.
    """
    from node.commands.flags import load_with_flags

    loaded = load_with_flags(
        config, settings, data_dir=data_dir, model=model, engine=engine, seed=seed,
        silo=silo or None, log_json=log_json or None, no_tty=no_tty or None,
        join=join or None, listen=listen or None, swarm=swarm, relay=relay or None,
    )  # fmt: skip
    # Not above: another package may have taken the name `verifiers`, which `main` tells.
    from verifiers.imports import importing

    with importing():
        from node.commands.starting import run_node

    raise typer.Exit(run_node(loaded, rounds))


@app.command(rich_help_panel=SETUP)
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("swarmnode.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite it.")] = False,
) -> None:
    """Write a configuration file with every setting, explained and commented out."""
    from node.commands.configuring import write_init_file

    write_init_file(path, force)


@app.command("config", rich_help_panel=SETUP)
def show_config(
    data_dir: DataDirOption = None,
    model: ModelOption = None,
    engine: EngineOption = None,
    config: FileOption = None,
    seed: SeedOption = None,
    settings: SetOption = None,
    json: JsonOption = False,
    toml: Annotated[bool, typer.Option("--toml", help="Print TOML.")] = False,
    reference: Annotated[bool, typer.Option("--reference", hidden=True)] = False,
) -> None:
    """Print the settings in force and where each came from."""
    from node.commands.configuring import print_config, print_reference
    from node.commands.flags import load_with_flags

    if reference:
        print_reference()
    else:
        loaded = load_with_flags(config, settings, data_dir=data_dir, model=model, engine=engine, seed=seed)
        print_config(loaded, "json" if json else "toml" if toml else "text")


@app.command(rich_help_panel=LOOK)
def status(
    data_dir: DataDirOption = None,
    json: JsonOption = False,
    check: Annotated[
        bool, typer.Option("--check", help="One line, and status 1 unless the node is at work; for supervisors.")
    ] = False,
) -> None:
    """Say how far the node is and how well it does. Works while it runs."""
    from node.commands.flags import data_dir_of

    path = data_dir_of(data_dir)
    if check:
        # Asked for often, so nothing is imported that it does not need.
        from node import health

        print(health.check(path))
        return
    from node.commands.controlling import print_served
    from node.status import print_status

    print_status(path, json)
    if not json:
        print_served(path)


@app.command("id", rich_help_panel=LOOK)
def show_id(data_dir: DataDirOption = None, json: JsonOption = False) -> None:
    """Print this node's id, and while it runs what others type to join it."""
    from node.commands.flags import data_dir_of
    from node.commands.swarming import print_id

    print_id(data_dir_of(data_dir), json)


@app.command(rich_help_panel=LOOK)
def peers(data_dir: DataDirOption = None, json: JsonOption = False) -> None:
    """List the other nodes that the running node knows, and what came of them."""
    from node.commands.flags import data_dir_of
    from node.commands.swarming import print_peers

    print_peers(data_dir_of(data_dir), json)


app.add_typer(cli_contribute.commands)
app.add_typer(cli_control.commands)


@app.command("eval", rich_help_panel=MODEL)
def evaluate(
    data_dir: DataDirOption = None,
    model: ModelOption = None,
    config: FileOption = None,
    per_task: Annotated[
        int | None, typer.Option("--per-task", min=1, help="Held-out tasks of each kind.", show_default=False)
    ] = None,
    best: BestOption = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="base|DIR",
            help="Compare with the base model, or with a checkpoint, a data directory or an exported model.",
            show_default=False,
        ),
    ] = None,
    settings: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Measure accuracy on held-out tasks: the base model and the current policy. Works while the node runs.

    \b
    swarmnode eval --per-task 8                  a quick look
    swarmnode eval --against base                with the error of the difference
    swarmnode eval --best --against runs/other   the best checkpoint, against another node's policy
    """
    from node.commands.evaluating import compare_policy, evaluate_run
    from node.commands.flags import load_run_with_flags

    loaded = load_run_with_flags(config, settings, data_dir=data_dir, model=model, per_task=per_task)
    if against is not None:
        compare_policy(loaded, against, json, best)
    else:
        evaluate_run(loaded, json, best)


@app.command(rich_help_panel=MODEL)
def chat(
    data_dir: DataDirOption = None,
    model: ModelOption = None,
    config: FileOption = None,
    system: Annotated[
        str | None, typer.Option("--system", help="System message of the conversation.", show_default=False)
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Begin with the base model.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.7,
    best: BestOption = False,
    settings: SetOption = None,
) -> None:
    """Talk to the current policy. Reads lines from a pipe, too."""
    from node.commands.chatting import Conversation, talk
    from node.commands.flags import load_run_with_flags

    loaded = load_run_with_flags(config, settings, data_dir=data_dir, model=model)
    talk(loaded, Conversation(system=system, base=base), max_new_tokens, temperature, best)


@app.command(rich_help_panel=MODEL)
def export(
    out: Annotated[Path, typer.Option("--out", help="Directory to write; must not exist or be empty.")],
    data_dir: DataDirOption = None,
    merged: Annotated[bool, typer.Option("--merged/--adapter", help="The whole model, or the adapter alone.")] = True,
    form: Annotated[
        Literal["safetensors", "gguf"], typer.Option("--format", help="gguf is for llama.cpp and what builds on it.")
    ] = "safetensors",
    best: BestOption = False,
    push: Annotated[
        str | None, typer.Option("--push", metavar="REPO", help="Upload to this hub repository.", show_default=False)
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the hub repository private.")] = False,
    settings: SetOption = None,
) -> None:
    """Write the current policy as a model or an adapter, with a model card.

    \b
    swarmnode export --out model                     for transformers and vLLM
    swarmnode export --out model --best --adapter    the adapter alone, for peft
    swarmnode export --out model --format gguf       for llama.cpp
    """
    from node.commands.exporting import Wanted, export_policy
    from node.commands.flags import load_run_with_flags

    loaded = load_run_with_flags(None, settings, data_dir=data_dir)
    export_policy(loaded.config, out, Wanted(merged, form, best), push, private)


app.add_typer(cli_rollouts.commands, name="rollouts", rich_help_panel=MODEL)


@app.command(rich_help_panel=MODEL)
def compare(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Data directories; others are held against the first.")
    ],
    png: Annotated[Path, typer.Option("--png", help="Where the curves are drawn.")] = Path("compare.png"),
    json: JsonOption = False,
) -> None:
    """Compare runs over the rounds they share: rewards and held-out accuracy, as a table and a picture.

    \b
    swarmnode compare runs/silo runs/swarm --png runs.png
    """
    from node.commands.comparing import compare_runs

    compare_runs(directories, png, json)


@app.command(rich_help_panel=SETUP)
def doctor(
    data_dir: DataDirOption = None,
    model: ModelOption = None,
    config: FileOption = None,
    settings: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Check that this machine can run a node, and say what to do where it cannot."""
    from node.commands.flags import load_with_flags
    from node.doctor import examine

    raise typer.Exit(examine(load_with_flags(config, settings, data_dir=data_dir, model=model).config, json))


@app.command("testnet", rich_help_panel=RUN)
def swarm_of_nodes(
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, max=64, help="How many; 4 unless told.", show_default=False)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Stop each node after this round.", show_default=False)
    ] = None,
    directory: Annotated[str, typer.Option("--dir", help="Where nodes and logs are kept.")] = "testnet",
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="For all nodes, or once a node; tiny unless told.", show_default=False),
    ] = None,
    engine: EngineOption = None,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", help="TOML file, for all nodes, or once a node.", show_default=False),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Fixes tasks and sampling of the first; +1 a node.", show_default=False)
    ] = None,
    kill_every: Annotated[
        float | None,
        typer.Option(
            "--kill-every", min=1.0, metavar="S", help="Kill a node each S seconds, for show.", show_default=False
        ),
    ] = None,
    no_tty: Annotated[bool, typer.Option("--no-tty", help="Plain log lines instead of the live view.")] = False,
    settings: SetOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print what came out as JSON.")] = False,
) -> None:
    """Run a swarm of nodes on this machine. They go on where they were; Ctrl-C saves and ends them."""
    from node.testnet.plan import Wishes
    from node.testnet.run import run_testnet

    wishes = Wishes(nodes, directory, rounds, model or (), config or (), settings or (), seed, engine)
    raise typer.Exit(run_testnet(wishes, kill_every, no_tty, json))


@app.command(rich_help_panel=SETUP)
def version() -> None:
    """Print the version."""
    typer.echo(distribution_version("swarmnode"))


def main() -> None:
    """Entry point of `swarmnode`. What the operator can put right is said in a line, the rest is a fault of ours.

    Ctrl-C ends with status 130, as the shell has it.
    """
    try:
        _main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BaseExceptionGroup as group:
        # Out of concurrent work it comes wrapped. Whatever came with it is the more important.
        _, rest = group.split(KeyboardInterrupt)
        if rest is not None:
            raise
        raise SystemExit(130) from None


def _main() -> None:
    _refuse_strangers()
    from rl.errors import LearnerError
    from verifiers.base import VerifierError

    try:
        app(prog_name="swarmnode")
    except NodeError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        raise SystemExit(error.exit_status) from error
    except (LearnerError, VerifierError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except OSError as error:
        problem = file_problem(error)
        if problem is None:
            raise
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(1) from error


def _refuse_strangers() -> None:
    """End if another distribution took the name of one of our packages: PyPI's `verifiers` has the same one."""
    ours = Path(__file__).resolve().parents[1]
    for name in ("p2p", "rl", "verifiers"):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None
        if found != ours / name / "__init__.py":
            raise SystemExit(
                f"error: `import {name}` finds {found or 'nothing'} instead of swarmnode's own package: run"
                f" `pip uninstall {name}`, and keep the other one in another environment"
            )


if __name__ == "__main__":
    main()
