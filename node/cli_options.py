"""What the commands of the command line share: options, and the panels of `swarmnode --help`."""

from pathlib import Path
from typing import Annotated

import typer

RUN = "Run a node"
LOOK = "See what it does"
MODEL = "What it learned"
SETUP = "Settings and machine"

# A text: as a path, an empty one would pass for the working directory.
DataDirOption = Annotated[
    str | None,
    typer.Option("--data-dir", help="Where the node keeps everything; each node needs its own.", show_default=False),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="auto, tiny, a directory or a hub id.", show_default=False)
]
EngineOption = Annotated[str | None, typer.Option("--engine", help="auto, vllm or transformers.", show_default=False)]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Fixes tasks and sampling.", show_default=False)]
FileOption = Annotated[
    Path | None, typer.Option("--config", help="TOML file, such as `init` writes.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, as in training.lr=1e-5.", show_default=False),
]
JoinOption = Annotated[
    list[str] | None,
    typer.Option("--join", metavar="ADDRESS", help="Node to begin with; may be given often.", show_default=False),
]
ListenOption = Annotated[
    list[str] | None,
    typer.Option("--listen", metavar="ADDRESS", help="Address to listen on; may be given often.", show_default=False),
]
BestOption = Annotated[
    bool, typer.Option("--best", help="The checkpoint that was best on held-out tasks, not the newest.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
