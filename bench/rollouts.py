"""How fast are rollouts? `python -m bench.rollouts [--sequences 8 64 128] [--repeats 5]`.

In one run, on the same prompts and in turn, so that what else the machine does falls on all alike:

- `node, vllm` and `node, transformers`: the learner process of a node, asked as a round asks it. Included are rendering
  the prompts, handing over and reading back text, and the check that the engine is live.
- `vllm`: vLLM's own `LLM.generate`, at the best setting known for this machine, without log-probs; `vllm, log-probs`
  with that of each sampled token, which the check needs.
- `generate`: `generate` of transformers on the same model.

The prompts ask for long answers, so that nearly all completions reach the limit of tokens. Printed are tokens a second
(median over the repeats, with their range) and the ratio to `vllm`: the median over repeats of the ratio of neighbours.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import matplotlib as mpl
import trio
from rich.console import Console
from rich.table import Table

from node.learner import open_learner
from rl.rollouts import Sampling
from rl.settings import LearnerSettings
from verifiers.base import Example, Task, TaskRef

mpl.use("Agg")
from matplotlib import pyplot as plt

GROUP = 8
"""Completions of one prompt."""
ANIMALS = ("a fox", "an owl", "a whale", "a snail", "a lynx", "a crane", "a bee", "a wolf", "an eel", "a hare")
PLACES = ("in a harbour", "on a mountain", "under the ice", "in an old library", "at the end of a long road")

Measurements = dict[str, dict[int, list[float]]]
"""Tokens a second: of which engine, at how many sequences, in each repeat."""


class Sampler(Protocol):
    """Samples GROUP completions of each task, and says how many tokens they have."""

    async def __call__(self, tasks: Sequence[Task], seed: int, /) -> int: ...


def make_tasks(groups: int, seed: int) -> list[Task]:
    """Tasks that nobody can answer in a few words. Two calls with different seeds share no question."""
    tasks = []
    for number in range(groups):
        hero, place = ANIMALS[number % len(ANIMALS)], PLACES[number // len(ANIMALS) % len(PLACES)]
        question = f"Tell me the long story of {hero} {place}, in the year {1000 + seed}, chapter {number + 1}."
        example = Example("Tell me the long story of a mouse.", "Once upon a time there was a mouse in a windy mill")
        tasks.append(Task(TaskRef("bench", "1", "{}", seed, number), "story", question, None, example))
    return tasks


def settings_of(model: str, engine: str, sequences: int, new_tokens: int) -> LearnerSettings:
    """The settings of a learner that samples `sequences` completions at once."""
    return LearnerSettings.model_validate(
        {
            "model": {"name": model},
            "prompt": {"system": "You are a storyteller who never stops."},
            "sampling": {"max_new_tokens": new_tokens},
            "engine": {"kind": engine, "max_sequences": sequences},
        }
    )


# Whole engines in processes of their own, behind a pipe: a list of prompts and a seed in, a number of tokens out.


def _serve(pipe: Connection, generate: Callable[[list[list[int]], int], int]) -> None:
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        pipe.send(generate(*request))


def raw_vllm(pipe: Connection, location: str, sequences: int, new_tokens: int, logprobs: int | None) -> None:
    """vLLM by itself."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(location, enforce_eager=True, block_size=32, max_model_len=2048, max_num_seqs=sequences)

    def generate(prompts: list[list[int]], seed: int) -> int:
        sampling = SamplingParams(n=GROUP, max_tokens=new_tokens, logprobs=logprobs, detokenize=False)
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = llm.generate(asked, sampling, use_tqdm=False)
        return sum(len(c.token_ids) for answer in answers for c in answer.outputs)

    _serve(pipe, generate)


def plain_generate(pipe: Connection, location: str, dtype: str) -> None:
    """`generate` of transformers, prompts padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(location)
    model: Any = AutoModelForCausalLM.from_pretrained(location, dtype=getattr(torch, dtype))
    model.eval()
    new_tokens = pipe.recv()

    def generate(prompts: list[list[int]], seed: int) -> int:
        torch.manual_seed(seed)
        width = max(map(len, prompts))
        ids = torch.tensor([[tokenizer.eos_token_id] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.no_grad():
            sampled = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=new_tokens,
                num_return_sequences=GROUP,
                pad_token_id=tokenizer.eos_token_id,
            )[:, width:]
        # What follows the first EOS is padding.
        ended = (sampled == tokenizer.eos_token_id).int().cumsum(1)
        return int(((ended == 0) | ((ended == 1) & (sampled == tokenizer.eos_token_id))).sum())

    _serve(pipe, generate)


@contextmanager
def worker(target: Callable[..., None], *arguments: Any, first: Any = None) -> Iterator[Connection]:
    """A process that runs `target(pipe, *arguments)`; `first` is sent to it before anything else."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    if first is not None:
        ours.send(first)
    try:
        if ours.recv() != "ready":
            raise RuntimeError(f"{target.__name__} did not start")
        yield ours
        ours.send(None)
        process.join(10)
    finally:
        process.kill()


def _over_pipe(pipe: Connection, render: Callable[[Task], list[int]]) -> Sampler:
    async def sample(tasks: Sequence[Task], seed: int) -> int:
        pipe.send(([render(task) for task in tasks], seed))
        return int(await trio.to_thread.run_sync(pipe.recv))

    return sample


async def measure(model: str, counts: Sequence[int], repeats: int, new_tokens: int, console: Console) -> Measurements:
    """Tokens a second of every engine, in turn."""
    # Only now, because they are slow to import.
    from transformers import AutoTokenizer

    from rl.models import resolve
    from rl.prompts import render

    most = max(counts)
    settings = settings_of(model, "vllm", most, new_tokens)
    found = resolve(settings.model)
    location, dtype = str(found.location), str(found.dtype).removeprefix("torch.")
    tokenizer: Any = AutoTokenizer.from_pretrained(location)

    def shown(task: Task) -> list[int]:
        return render(tokenizer, settings.prompt, task)

    results: Measurements = {}
    async with trio.open_nursery() as nursery:
        learners: dict[str, Sampler] = {}
        for engine in ("vllm", "transformers"):
            learners[f"node, {engine}"] = await nursery.start(
                _learner, settings_of(model, engine, most, new_tokens), new_tokens, console
            )
        with ExitStack() as stack:

            def open_worker(target: Callable[..., None], *arguments: Any, first: Any = None) -> Sampler:
                console.print(f"starting {target.__name__}")
                return _over_pipe(stack.enter_context(worker(target, *arguments, first=first)), shown)

            # Neighbours in time are compared, so the two that matter most stand side by side.
            samplers = {
                "node, vllm": learners["node, vllm"],
                "vllm": open_worker(raw_vllm, location, most, new_tokens, None),
                "vllm, log-probs": open_worker(raw_vllm, location, most, new_tokens, 0),
                "node, transformers": learners["node, transformers"],
                "generate": open_worker(plain_generate, location, dtype, first=new_tokens),
            }
            for count in counts:
                for repeat in range(-1, repeats):
                    for name, sample in samplers.items():
                        speed = await _timed(sample, make_tasks(max(1, count // GROUP), repeat + 2 + 100 * count))
                        # The first pass only warms up.
                        if repeat >= 0:
                            results.setdefault(name, {}).setdefault(count, []).append(speed)
                            console.print(f"{count:4d} sequences  {name:20s} {speed:6.0f} tokens/s")
        nursery.cancel_scope.cancel()
    return results


async def _timed(sample: Sampler, tasks: Sequence[Task]) -> float:
    begun = time.perf_counter()
    tokens = await sample(tasks, tasks[0].ref.seed)
    return tokens / (time.perf_counter() - begun)


async def _learner(
    settings: LearnerSettings,
    new_tokens: int,
    console: Console,
    task_status: trio.TaskStatus[Sampler] = trio.TASK_STATUS_IGNORED,  # type: ignore[name-defined]
) -> None:
    """A node's learner process, until it is cancelled."""
    console.print(f"starting a node's learner with {settings.engine.kind}")
    async with open_learner(lambda done, total, unit: None, lambda level, text: None) as learner:
        await learner.start(settings, None)

        async def sample(tasks: Sequence[Task], seed: int) -> int:
            groups = await learner.generate(tasks, Sampling(GROUP, new_tokens), seed)
            return sum(len(c.tokens or ()) for group in groups for c in group.completions)

        task_status.started(sample)
        await trio.sleep_forever()


def ratio(results: Measurements, name: str, count: int, to: str = "vllm") -> float:
    """Median over the repeats of how much faster `name` is than `to`."""
    return statistics.median(a / b for a, b in zip(results[name][count], results[to][count], strict=True))


def show(results: Measurements, console: Console) -> None:
    """Print the table."""
    table = Table(title="rollouts, tokens a second")
    table.add_column("engine")
    counts = list(next(iter(results.values())))
    for count in counts:
        table.add_column(f"{count} sequences", justify="right")
        table.add_column("of vllm", justify="right")
        table.add_column("of generate", justify="right")
    for name, by_count in results.items():
        cells = [name]
        for count in counts:
            speeds = by_count[count]
            cells += [f"{statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f})"]
            cells += [f"{ratio(results, name, count):.2f}", f"{ratio(results, name, count, 'generate'):.2f}"]
        table.add_row(*cells)
    console.print(table)


def draw(results: Measurements, path: Path) -> None:
    """A plot of tokens a second against the number of sequences."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, by_count in results.items():
        counts = list(by_count)
        axes.plot(counts, [statistics.median(by_count[count]) for count in counts], marker="o", label=name)
    axes.set(xlabel="sequences at once", ylabel="tokens a second", ylim=(0, None), xscale="log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="auto", help="as [model] name")
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 64, 128], help="completions at once")
    parser.add_argument("--new-tokens", type=int, default=48, help="longest completion")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw them into this PNG")
    arguments = parser.parse_args()
    console = Console(width=140)
    results = trio.run(measure, arguments.model, arguments.sequences, arguments.repeats, arguments.new_tokens, console)
    show(results, console)
    if arguments.plot:
        draw(results, arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
