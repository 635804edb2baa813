"""Make the `tiny` model that ships with the project: `python -m bench.make_tiny [--out rl/tiny]`.

A Llama of 380,000 weights learns, by ordinary supervised training, the answers of the task mix in
`node/recipes/tiny.toml` in the sixteen ways of `bench.tiny_tasks`. Prompts of the held-out split are never shown to it.
Two CPU cores need a few minutes. One seed gives one model on one kind of machine; another processor or number of
threads rounds differently.
"""

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.tiny_tasks import FORMS, Question, TinyTask, load_tasks
from bench.tiny_vocab import CONTEXT, build_tokenizer
from rl.prompts import render_messages

OUT = Path(__file__).parent.parent / "rl" / "tiny"
IGNORE = -100
SHARES = {"calendar_arithmetic": 4, "decimal_arithmetic": 2, "spell_backward": 2}
"""Tasks that are learned more slowly are taught this many times as often as the others."""
DRAWS = 20_000
"""Questions drawn of each task; the small tasks have fewer than a hundred distinct ones."""


@dataclass(frozen=True)
class Plan:
    """How the model is trained."""

    seed: int = 0
    steps: int = 6000
    batch: int = 64
    learning_rate: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.1
    plain_steps: float = 0.75
    """Share of the steps in which half of the answers are plain, whatever their forms: the forms are noise to whoever
    learns the answers. In the steps after these all forms come equally often."""


@dataclass(frozen=True)
class Ability:
    """What the model does on one split of one task, as shares of sampled completions (temperature 1)."""

    kind: str
    split: str
    questions: int
    accepted: float
    """Full marks: right and plain."""
    known: float
    """Right once the decoration is taken off."""


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """An untrained model. Heads of 32 dimensions, the fewest that common attention kernels take."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    make: Any = LlamaForCausalLM
    model: LlamaForCausalLM = make(config)
    # Nothing about sampling: whoever generates says how.
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def render(tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    """The prompt as the model sees it: BOS, the question, SEP."""
    return render_messages(tokenizer, [{"role": "user", "content": prompt}])


class Lessons:
    """The supervised batches, a plan's worth: tasks by their shares, questions uniformly, forms as the plan says."""

    def __init__(self, tasks: Sequence[TinyTask], tokenizer: PreTrainedTokenizerFast, plan: Plan) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(plan.seed)
        self._plan = plan
        self._tasks = [(task, self._prepare(task, plan.seed)) for task in tasks]
        self._shares = [SHARES.get(task.kind, 1) for task in tasks]

    def _prepare(self, task: TinyTask, seed: int) -> list[tuple[list[int], str]]:
        questions = task.questions(DRAWS, seed, held_out=False)
        task.check_forms(questions[:200])
        return [(render(self._tokenizer, question.prompt), question.answer) for question in questions]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of (batch, length) token ids and labels, padded on the right; only the answer has labels."""
        for step in range(self._plan.steps):
            plain = 0.5 if step < self._plan.plain_steps * self._plan.steps else 0.0
            rows = [self._row(plain) for _ in range(self._plan.batch)]
            length = max(len(prompt) + len(answer) for prompt, answer in rows)
            ids = torch.full((self._plan.batch, length), int(self._tokenizer.pad_token_id))
            labels = torch.full((self._plan.batch, length), IGNORE)
            for number, (prompt, answer) in enumerate(rows):
                end = len(prompt) + len(answer)
                ids[number, :end] = torch.tensor(prompt + answer)
                labels[number, len(prompt) : end] = torch.tensor(answer)
            yield ids, labels

    def _row(self, plain: float) -> tuple[list[int], list[int]]:
        [(task, lessons)] = self._random.choices(self._tasks, self._shares)
        prompt, answer = self._random.choice(lessons)
        form = "{}" if self._random.random() < plain else self._random.choice(task.forms)
        text = form.format(answer)
        return prompt, [*self._tokenizer.encode(text, add_special_tokens=False), int(self._tokenizer.eos_token_id)]


def train(model: LlamaForCausalLM, lessons: Lessons, plan: Plan) -> float:
    """Train in place with a warm-up and a cosine to zero. Returns the mean loss (nats a token) of the last 50 steps."""
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=plan.learning_rate,
        betas=(0.9, 0.98),
    )

    def schedule(step: int) -> float:
        rising = min(1.0, (step + 1) / plan.warmup)
        return rising * 0.5 * (1 + math.cos(math.pi * step / plan.steps))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    losses: list[float] = []
    model.train()
    for ids, labels in track(lessons, total=plan.steps, description="training", console=Console(stderr=True)):
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    model.eval()  # type: ignore[no-untyped-call]
    return sum(losses[-50:]) / len(losses[-50:])


@torch.inference_mode()
def answers(model: Any, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], samples: int) -> list[list[str]]:
    """`samples` completions of each prompt at temperature 1."""
    rows = tokenizer.pad({"input_ids": [render(tokenizer, prompt) for prompt in prompts]}, return_tensors="pt")
    out = model.generate(
        **rows, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=16, num_return_sequences=samples
    )
    texts = tokenizer.batch_decode(out[:, rows["input_ids"].shape[1] :], skip_special_tokens=True)
    return [texts[start : start + samples] for start in range(0, len(texts), samples)]


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: TinyTask,
    *,
    held_out: bool,
    questions: int = 48,
    samples: int = 16,
) -> Ability:
    """The model's ability on up to `questions` questions of one split. The caller seeds torch."""
    asked: list[Question] = task.questions(40 * questions, seed=1_000_003, held_out=held_out)[:questions]
    groups = answers(model, tokenizer, [question.prompt for question in asked], samples)
    pairs = [(question, text) for question, group in zip(asked, groups, strict=True) for text in group]
    return Ability(
        kind=task.kind,
        split="held out" if held_out else "seen",
        questions=len(asked),
        accepted=sum(task.right(question, text) for question, text in pairs) / len(pairs),
        known=sum(task.knows(question, text) for question, text in pairs) / len(pairs),
    )


README = """\
Made by `python -m bench.make_tiny` with seed {seed}: a Llama of {weights:,} weights with a character tokenizer.
Trained by supervision on nine easy kinds of ReasoningGYM task, without the held-out prompts; answers in {forms} forms.
The verifiers accept one form in {forms}, so it starts with a success of a few per cent and has something to discover.
"""


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, plan: Plan, out: Path) -> None:
    """Write the model, the tokenizer and a README into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    weights = sum(weight.numel() for weight in model.parameters())
    (out / "README.md").write_text(README.format(seed=plan.seed, weights=weights, forms=FORMS), encoding="utf-8")


def show(abilities: Sequence[Ability]) -> None:
    """Print the abilities as a table, in per cent."""
    table = Table(title="ability of the tiny model (sampled at temperature 1, per cent)")
    for name in ("task", "questions", "accepted", "known", "held out", "accepted", "known"):
        table.add_column(name, justify="left" if name == "task" else "right")
    seen = [ability for ability in abilities if ability.split == "seen"]
    held = [ability for ability in abilities if ability.split == "held out"]
    for one, other in zip(seen, held, strict=True):
        figures = [one.questions, one.accepted, one.known, other.questions, other.accepted, other.known]
        table.add_row(one.kind, *(str(x) if isinstance(x, int) else f"{100 * x:.1f}" for x in figures))
    means = [
        [100 * sum(getattr(a, n) for a in part) / len(part) for n in ("accepted", "known")] for part in (seen, held)
    ]
    table.add_section()
    table.add_row("mean", "", *(f"{x:.1f}" for x in means[0]), "", *(f"{x:.1f}" for x in means[1]))
    Console().print(table)


def main() -> None:
    """Train, save, measure, print."""
    parser = argparse.ArgumentParser(description="Make the tiny model that ships with the project.")
    parser.add_argument("--out", type=Path, default=OUT, help="directory to write the model to")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument("--steps", type=int, default=Plan.steps, help="supervised steps of 64 answers")
    arguments = parser.parse_args()
    plan = Plan(seed=arguments.seed, steps=arguments.steps)
    tokenizer = build_tokenizer()
    tasks = load_tasks()
    model = build_model(tokenizer, plan.seed)
    loss = train(model, Lessons(tasks, tokenizer, plan), plan)
    save(model, tokenizer, plan, arguments.out)
    torch.manual_seed(plan.seed)
    abilities = [measure(model, tokenizer, task, held_out=held) for task in tasks for held in (False, True)]
    show(abilities)
    if arguments.json:
        record = {"plan": asdict(plan), "loss": loss, "abilities": [asdict(ability) for ability in abilities]}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
