"""`swarmnode export`: the policy as files that others load, with a model card."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import huggingface_hub
from huggingface_hub import errors

from node import logs
from node.config import Config
from node.errors import NodeError
from node.model_card import MODEL_GGUF, model_card
from node.policy import best, newest, open_policy

if TYPE_CHECKING:
    from rl.learner import Learner

# The base of what its HTTP client raises, whichever that client is.
_HTTPError: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]


Form = Literal["safetensors", "gguf"]


@dataclass(frozen=True)
class Wanted:
    """What to write: the whole model or the adapter, in which format, of the newest checkpoint or of the best."""

    merged: bool = True
    form: Form = "safetensors"
    best: bool = False


def export_policy(config: Config, out: Path, wanted: Wanted, push: str | None, private: bool) -> None:
    """Write the policy into `out`, whole or not at all, and upload it if asked.

    Raises NodeError if there is nothing to export, `out` is taken, or the hub refuses.
    """
    logs.configure(config.log)
    if private and push is None:
        raise NodeError("--private says how to --push: give --push REPO too, or leave it out")
    token = _token() if push is not None else None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise NodeError(f"{out} exists and is not an empty directory: give another --out")
    find = best if wanted.best else newest
    if find(config) is None:
        raise NodeError(f"there is no whole checkpoint in {config.node.data_dir} yet: nothing has been trained")
    if not wanted.merged and config.lora.rank == 0:
        raise NodeError("this policy has no adapter, all its weights were trained: leave --adapter out")
    if not wanted.merged and wanted.form == "gguf":
        raise NodeError("--format gguf is for the whole model: leave --adapter out")
    with open_policy(config, find) as current:
        if current.checkpoint is None:
            raise NodeError(f"the checkpoints in {config.node.data_dir} have gone meanwhile")
        rounds = current.checkpoint.round
        try:
            _write(config, current.learner, rounds, out, wanted)
        except OSError as error:
            raise NodeError(f"{out} cannot be written: {error.strerror or error}") from error
    what = "merged model" if wanted.merged else "adapter"
    print(f"{out} written: the {what} after round {rounds}{' as GGUF' if wanted.form == 'gguf' else ''}")
    if push is not None:
        _push(out, push, private, token)


def _write(config: Config, learner: "Learner", rounds: int, out: Path, wanted: Wanted) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as directory:
        made = Path(directory) / "export"
        made.mkdir()
        learner.export(made, merged=wanted.merged)
        model = learner.policy.resolved
        if wanted.form == "gguf":
            from rl.gguf_file import write_gguf

            whole = made.rename(Path(directory) / "whole")
            made.mkdir()
            write_gguf(whole, made / MODEL_GGUF, model.public_name)
        card = model_card(config, model.identity, model.public_name, rounds, wanted.merged, wanted.form)
        (made / "README.md").write_text(card, "utf-8")
        for path in made.glob("*.safetensors"):
            path.chmod((made / "README.md").stat().st_mode)  # the library keeps them from everybody else
        if out.exists():
            out.rmdir()
        made.rename(out)


def _token() -> str:
    token = huggingface_hub.get_token()
    if token is None:
        raise NodeError("--push needs a token of the hub: set HF_TOKEN, or run `hf auth login`")
    return token


def _push(out: Path, repository: str, private: bool, token: str | None) -> None:
    api = huggingface_hub.HfApi(token=token)
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=out, commit_message="Policy trained with swarmnode")
    except (_HTTPError, errors.OfflineModeIsEnabled, ValueError, OSError) as error:
        raise NodeError(f"{out} is written, but {repository} did not take it: {error}") from error
    print(f"uploaded to {url}", file=sys.stderr)
