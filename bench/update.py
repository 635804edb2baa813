"""How fast is a learning step? `python -m bench.update [--cells P50C32 P200C32] [--peer] [--json FILE] [--plot FILE]`.

One GRPO update of a LoRA adapter on the same groups of token ids, by a node's own policy (`rl.policy`) and, with
`--peer`, by the `GRPOTrainer` of TRL (`pip install trl`), each in a process of its own, one after the other. P is the
length of a prompt in tokens, C that of a completion, L the number of completions of each prompt.

- `seconds`: an update, optimiser step included: the median over the repeats. TRL's is the mean of its micro-batches of
  8 completions after the first, times their number, and its optimiser step; `--peer-batches` says how many are run.
- `peak`: the most memory that the process ever had, model and libraries included.
- `FLOP/s`: the arithmetic that an update cannot do without (each prompt once through the layers, forwards and backwards
  to the inputs; the output layer at completions only; the adapter's own products left out), by its seconds.
- `limit`: the seconds of that arithmetic at the rate of this machine's matrix products, measured in the same run.
"""

import argparse
import json
import multiprocessing
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import matplotlib as mpl
from rich.console import Console
from rich.table import Table

from rl.batches import Group, Row
from rl.settings import LearnerSettings

mpl.use("Agg")
from matplotlib import pyplot as plt

CELLS = tuple(f"P{prompt}C{completion}" for completion in (32, 256) for prompt in (50, 200, 800))
GROUPS = 8
"""Prompts of an update."""
BATCH = 8
"""Completions in one of TRL's micro-batches."""
RATE = 1e-5
"""Learning rate of both."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of each prompt and of each completion, and completions of a prompt."""

    prompt: int
    completion: int
    samples: int = 8

    @property
    def name(self) -> str:
        """As in the table; eight completions of a prompt go unsaid."""
        return f"P{self.prompt}C{self.completion}" + (f"L{self.samples}" if self.samples != 8 else "")

    @classmethod
    def of(cls, name: str) -> "Shape":
        """From its name. Raises ValueError."""
        found = re.fullmatch(r"P(\d+)C(\d+)(?:L(\d+))?", name)
        if not found:
            raise ValueError(f"{name} is no cell: write it as P50C32 or P50C32L16")
        return cls(int(found[1]), int(found[2]), int(found[3] or 8))


@dataclass(frozen=True, slots=True)
class Measured:
    """What a way to make the update took: seconds of each repeat, and the process's peak memory in GB."""

    seconds: list[float]
    peak_gb: float

    @property
    def median(self) -> float:
        """Seconds an update."""
        return statistics.median(self.seconds)


def make_groups(shape: Shape, vocabulary: int, groups: int = GROUPS) -> list[Group]:
    """The same groups whoever asks: random token ids, and advantages of every sign that sum to zero in each group."""
    random = Random(f"{shape.prompt}/{shape.completion}/{shape.samples}")

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.randrange(vocabulary) for _ in range(count))

    def advantage(place: int) -> float:
        return 1.0 if place % 2 else -1.0

    return [
        Group(tokens(shape.prompt), tuple(Row(tokens(shape.completion), advantage(n)) for n in range(shape.samples)))
        for _ in range(groups)
    ]


def learner_settings(model: str, threads: int) -> LearnerSettings:
    """A node's settings; what is not given here is as it is for everybody."""
    return LearnerSettings.model_validate(
        {"model": {"name": model}, "training": {"lr": RATE, "decay_after": 0}, "threads": threads}
    )


# Each way in a process of its own.


def own(pipe: Connection, settings: LearnerSettings, shape: Shape, repeats: int, apart: bool) -> None:
    """A node's policy; `apart` without any prompt shared, as a model does that takes no block mask."""
    import torch

    from rl.models import resolve
    from rl.policy import Policy

    torch.set_num_threads(settings.threads)
    policy = Policy(resolve(settings.model), settings)
    policy.scorer.packing = policy.scorer.packing and not apart
    groups = make_groups(shape, len(policy.tokenizer))
    seconds = []
    for repeat in range(repeats + 1):
        begun = time.perf_counter()
        stats = policy.update(groups, repeat)
        seconds.append(time.perf_counter() - begun)
        if stats.policy_step != repeat + 1:
            raise RuntimeError("no optimiser step was made")
    # The first one warms up.
    pipe.send(Measured(seconds[1:], _peak()))


def peer(pipe: Connection, settings: LearnerSettings, shape: Shape, batches: int) -> None:
    """TRL's GRPOTrainer, told what has been sampled instead of sampling."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rl.models import resolve

    torch.set_num_threads(settings.threads)
    resolved = resolve(settings.model)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(resolved.location))
    groups = make_groups(shape, len(tokenizer))
    count = min(batches, GROUPS * shape.samples // BATCH)
    rows = [(group.prompt, row) for group in groups for row in group.rows]
    # One more in front, which warms up.
    rows = (rows[:BATCH] + rows)[: (count + 1) * BATCH]
    given = {
        "prompt_ids": torch.tensor([prompt for prompt, _ in rows]),
        "completion_ids": torch.tensor([row.tokens for _, row in rows]),
        "advantages": torch.tensor([row.advantage for _, row in rows]),
    }
    given |= {name.replace("ids", "mask"): torch.ones_like(given[name]) for name in ("prompt_ids", "completion_ids")}
    given["num_items_in_batch"] = given["completion_mask"].sum()
    times: list[float] = []
    whole: list[float] = []

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return dict(given)

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            loss = super().training_step(*arguments, **options)
            times.append(time.perf_counter() - begun)
            return loss

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            whole.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            whole.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            model=str(resolved.location),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=directory,
                model_init_kwargs={"dtype": str(resolved.dtype).removeprefix("torch.")},
                per_device_train_batch_size=BATCH,
                gradient_accumulation_steps=count + 1,
                num_generations=BATCH,
                max_completion_length=shape.completion,
                max_steps=1,
                learning_rate=RATE,
                beta=0.0,
                gradient_checkpointing=False,
                use_cpu=resolved.device == "cpu",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["-"] * len(rows)}),
            processing_class=tokenizer,
            peft_config=LoraConfig(
                r=settings.lora.rank, lora_alpha=settings.lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
            callbacks=[Clock()],
        )
        trainer.train()
    if len(times) != count + 1 or trainer.state.global_step != 1:
        raise RuntimeError("TRL did not make the one step that it was asked for")
    rest = whole[1] - whole[0] - sum(times)
    pipe.send(Measured([statistics.fmean(times[1:]) * GROUPS * shape.samples / BATCH + rest], _peak()))


def machine(pipe: Connection, settings: LearnerSettings) -> None:
    """The arithmetic of the model, and the fastest of its matrix products in operations a second."""
    import torch

    from rl.models import resolve

    torch.set_num_threads(settings.threads)
    resolved = resolve(settings.model)
    model = _Model.read(resolved.location)
    best = 0.0
    for rows, inputs, outputs in ((2048, model.hidden, model.inner), (2048, model.inner, model.hidden)):
        one = torch.randn(rows, inputs, dtype=resolved.dtype, device=resolved.device)
        other = torch.randn(outputs, inputs, dtype=resolved.dtype, device=resolved.device)
        for _ in range(20):
            begun = time.perf_counter()
            product = torch.nn.functional.linear(one, other)
            product[0, 0].item()
            best = max(best, 2.0 * rows * inputs * outputs / (time.perf_counter() - begun))
    pipe.send((model, best))


@dataclass(frozen=True, slots=True)
class _Model:
    """Sizes of a model: of its layers, and weights of all their products."""

    hidden: int
    inner: int
    vocabulary: int
    layers: int
    heads: int
    width: int
    weights: int

    @classmethod
    def read(cls, location: Path) -> "_Model":
        config = json.loads((location / "config.json").read_text("utf-8"))
        hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
        width = config.get("head_dim") or hidden // heads
        kept = config.get("num_key_value_heads", heads)
        each = hidden * width * (2 * heads + 2 * kept) + 3 * hidden * inner
        layers = config["num_hidden_layers"]
        return cls(hidden, inner, config["vocab_size"], layers, heads, width, layers * each)

    def operations(self, shape: Shape, groups: int = GROUPS) -> float:
        """What an update has to do: two passes over weights, and over attention one and twice as much back."""
        own, prompt = shape.completion - 1, shape.prompt
        positions = groups * (prompt + shape.samples * own)
        scored = groups * shape.samples * shape.completion
        pairs = groups * (prompt * (prompt + 1) / 2 + shape.samples * (own * prompt + own * (own + 1) / 2))
        attention = 12.0 * pairs * self.heads * self.width * self.layers
        return 4.0 * self.weights * positions + 4.0 * self.vocabulary * self.hidden * scored + attention


def _peak() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def answer(target: Callable[..., None], *arguments: Any) -> Any:
    """What `target(pipe, *arguments)` sends from a process of its own. Raises RuntimeError if it ends before."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        found = ours.recv()
        process.join()
        return found
    except EOFError:
        raise RuntimeError(f"{target.__name__} ended without a result: see above") from None
    finally:
        process.kill()


# What is printed.


def measure(
    settings: LearnerSettings, shapes: Sequence[Shape], ways: Sequence[str], repeats: int, batches: int, say: Console
) -> dict[str, dict[str, Measured]]:
    """All ways at all shapes, by name of the shape and of the way."""
    calls: dict[str, tuple[Any, ...]] = {
        "own": (own, repeats, False),
        "apart": (own, repeats, True),
        "trl": (peer, batches),
    }
    found: dict[str, dict[str, Measured]] = {}
    for shape in shapes:
        for way in ways:
            target, *rest = calls[way]
            result = answer(target, settings, shape, *rest)
            found.setdefault(shape.name, {})[way] = result
            say.print(f"{shape.name:10s} {way:6s} {result.median:8.2f} s  {result.peak_gb:5.1f} GB", highlight=False)
    return found


def show(found: dict[str, dict[str, Measured]], model: _Model, rate: float, say: Console) -> None:
    """Print the table."""
    table = Table(title=f"an update, {GROUPS} groups; matrix products reach {rate / 1e9:,.0f} GFLOP/s")
    for name in ("cell", "TRL s", "apart s", "s", "of TRL's speed", "tokens/s", "GFLOP/s", "of limit", "limit s"):
        table.add_column(name, justify="right" if name != "cell" else "left")
    table.add_column("TRL GB", justify="right")
    table.add_column("GB", justify="right")
    for name, ways in found.items():
        shape = Shape.of(name)
        needed, mine = model.operations(shape), ways["own"].median
        trl, apart = ways.get("trl"), ways.get("apart")
        table.add_row(
            name,
            f"{trl.median:.1f}" if trl else "-",
            f"{apart.median:.1f}" if apart else "-",
            f"{mine:.2f}",
            f"{trl.median / mine:.1f}" if trl else "-",
            f"{GROUPS * shape.samples * shape.completion / mine:,.0f}",
            f"{needed / mine / 1e9:,.0f}",
            f"{needed / rate / mine:.2f}",
            f"{needed / rate:.2f}",
            f"{trl.peak_gb:.1f}" if trl else "-",
            f"{ways['own'].peak_gb:.1f}",
        )
    say.print(table)


def draw(found: dict[str, dict[str, Measured]], model: _Model, rate: float, path: Path) -> None:
    """Seconds of each way at each shape, and the limit, as bars on a logarithmic scale."""
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    names = {"trl": "TRL", "apart": "each completion with its prompt", "own": "swarmnode"}
    bars = {
        names[way]: [ways[way].median for ways in found.values()] for way in names if way in next(iter(found.values()))
    }
    bars["limit of this machine"] = [model.operations(Shape.of(cell)) / rate for cell in found]
    for number, (name, seconds) in enumerate(bars.items()):
        places = [cell + (number - (len(bars) - 1) / 2) * 0.8 / len(bars) for cell in range(len(found))]
        axes.bar(places, seconds, 0.75 / len(bars), label=name)
    axes.set(ylabel="seconds an update", yscale="log")
    axes.set_xticks(range(len(found)), found)
    axes.grid(axis="y", color="#e5e7eb", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(bars), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def as_json(found: dict[str, dict[str, Measured]], model: _Model, rate: float) -> dict[str, dict[str, float]]:
    """The figures by cell, as `--json` writes them."""
    cells: dict[str, dict[str, float]] = {}
    for name, ways in found.items():
        shape, mine = Shape.of(name), ways["own"]
        cell = {
            "seconds": mine.median,
            "peak_gb": mine.peak_gb,
            "tokens_per_second": GROUPS * shape.samples * shape.completion / mine.median,
            "flops": model.operations(shape) / mine.median,
            "limit_seconds": model.operations(shape) / rate,
        }
        for way in ways.keys() - {"own"}:
            cell |= {
                f"{way}_{key}": value for key, value in (("seconds", ways[way].median), ("peak_gb", ways[way].peak_gb))
            }
        cells[name] = cell
    return cells


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="auto", help="as [model] name")
    parser.add_argument("--cells", nargs="+", default=CELLS, help="such as P50C32, or P50C32L16 for 16 completions")
    parser.add_argument("--peer", action="store_true", help="TRL, too")
    parser.add_argument(
        "--peer-batches", type=int, default=8, help="its micro-batches that are run, of those there are"
    )
    parser.add_argument("--apart", action="store_true", help="also with each completion repeating its prompt")
    parser.add_argument("--repeats", type=int, default=3, help="measured updates")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw them into this PNG")
    parser.add_argument("--smoke", action="store_true", help="one small cell of the tiny model, to see that all works")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.model, arguments.cells, arguments.repeats = "tiny", ["P20C8"], 1
    try:
        shapes = [Shape.of(name) for name in arguments.cells]
    except ValueError as error:
        parser.error(str(error))
    console = Console(width=140)
    settings = learner_settings(arguments.model, arguments.threads)
    ways = ["own", *(["apart"] if arguments.apart else []), *(["trl"] if arguments.peer else [])]
    model, rate = answer(machine, settings)
    found = measure(settings, shapes, ways, arguments.repeats, arguments.peer_batches, console)
    show(found, model, rate, console)
    if arguments.plot:
        draw(found, model, rate, arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(found, model, rate), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
