"""The engine that needs nothing but torch: it samples with the model that trains, so new weights are live at once.

Each prompt is computed once for all its completions, and a finished completion leaves the batch. Sampling parameters
are exactly those asked for: what a model's own generation_config suggests (top-k, repetition penalty) is not applied,
because the learning step needs samples of the policy itself.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rl.engines.base import Emit, Sampled
from rl.errors import ModelError, OutOfMemory
from rl.policy import Policy
from rl.rollouts import Sampling
from rl.work import Progress, Stop, check_stop, is_out_of_memory

log = logging.getLogger(__name__)


class TransformersEngine:
    """An `InferenceEngine` over the policy's own module."""

    name = "transformers"
    seconds_sync = 0.0
    apart = False

    def __init__(self, policy: Policy, max_sequences: int) -> None:
        self._policy = policy
        self._max_sequences = max_sequences
        self.context = policy.context
        model = policy.model
        self._device = policy.resolved.device
        self._stops = torch.tensor(sorted(policy.stop_tokens), device=self._device)
        # Output layers are often padded to a round size; what lies beyond the tokenizer has no text.
        self._vocabulary = min(len(policy.tokenizer), int(model.config.vocab_size))

    def refresh(self) -> None:
        """Nothing to do: the weights are the policy's."""

    def hand_over(self) -> None:
        """Nothing to do, either."""

    def about(self) -> dict[str, Any]:
        """See `InferenceEngine.about`."""
        return {"max_sequences": self._max_sequences}

    def close(self) -> None:
        """Nothing to give back."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seed: int,
        *,
        base: bool = False,
        stop: Stop,
        progress: Progress,
        emit: Emit | None = None,
    ) -> list[list[Sampled]]:
        """See `InferenceEngine.generate`. The batch shrinks, with a warning, when memory runs out."""
        generator = torch.Generator(self._device).manual_seed(seed % 2**63)
        wanted = [(number, sampling.samples) for number in sorted(range(len(prompts)), key=lambda n: len(prompts[n]))]
        results: list[list[Sampled]] = [[] for _ in prompts]
        total = sampling.samples * len(prompts)
        with torch.no_grad(), self._policy.weights.base() if base else nullcontext():
            while wanted:
                before = total - sum(count for _, count in wanted)
                batch, rest = self._take(wanted)

                def watch(ended: int, before: int = before) -> None:
                    check_stop(stop)
                    progress(before + ended, total, "completions")

                sampled = self._within_memory(prompts, batch, sampling, generator, watch, emit)
                if sampled is None:
                    continue
                wanted = rest
                for number, completions in sampled:
                    results[number] += completions
        progress(total, total, "completions")
        return results

    def _take(self, wanted: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Split off as many completions as may be sampled at once: (prompt number, completions)."""
        batch: list[tuple[int, int]] = []
        rest = list(wanted)
        room = self._max_sequences
        while rest and room:
            number, count = rest.pop(0)
            taken = min(count, room)
            batch.append((number, taken))
            room -= taken
            if taken < count:
                rest.insert(0, (number, count - taken))
        return batch, rest

    def _within_memory(
        self,
        prompts: Sequence[Sequence[int]],
        batch: list[tuple[int, int]],
        sampling: Sampling,
        generator: torch.Generator,
        watch: Callable[[int], None],
        emit: Emit | None,
    ) -> list[tuple[int, list[Sampled]]] | None:
        """The completions of a batch, or None if memory ran out and the next try takes fewer."""
        try:
            counts = [count for _, count in batch]
            sampled = self._sample([prompts[n] for n, _ in batch], counts, sampling, generator, watch, emit)
            return list(zip([n for n, _ in batch], sampled, strict=True))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        size = sum(count for _, count in batch)
        if size == 1:
            raise OutOfMemory("memory ran out while sampling a single completion: take a smaller model")
        self._max_sequences = size // 2
        log.warning("memory ran out while sampling: at most %d completions at once from now on", self._max_sequences)
        return None

    def _sample(
        self,
        prompts: Sequence[Sequence[int]],
        counts: list[int],
        sampling: Sampling,
        generator: torch.Generator,
        watch: Callable[[int], None],
        emit: Emit | None,
    ) -> list[list[Sampled]]:
        """`counts[i]` completions of `prompts[i]`, all at once. `watch` gets the number that have ended."""
        state = _Decoding(self._policy.model, prompts, counts, self._device)
        rows = len(state.alive)
        tokens = torch.zeros(rows, sampling.max_new_tokens, dtype=torch.long, device=self._device)
        logprobs = torch.zeros(rows, sampling.max_new_tokens, device=self._device)
        lengths = torch.zeros(rows, dtype=torch.long, device=self._device)
        finished = torch.zeros(rows, dtype=torch.bool, device=self._device)
        for step in range(sampling.max_new_tokens):
            watch(rows - len(state.alive))
            token, logprob = self._draw(state.logits, sampling, generator)
            tokens[state.alive, step] = token
            logprobs[state.alive, step] = logprob
            lengths[state.alive] = step + 1
            ended = torch.isin(token, self._stops)
            finished[state.alive] = ended
            if emit is not None:
                emit(int(token[0]))
            if bool(ended.all()) or step + 1 == sampling.max_new_tokens:
                break
            state.advance(token, ~ended)
        completions = [
            Sampled(tuple(t[:n]), tuple(p[:n]), f)
            for t, p, n, f in zip(tokens.tolist(), logprobs.tolist(), lengths.tolist(), finished.tolist(), strict=True)
        ]
        ends = torch.tensor(counts).cumsum(0).tolist()
        return [completions[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def _draw(self, logits: Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One token for each row of logits [B, vocabulary], and its log-prob at temperature 1.

        Raises ModelError if the logits are no distribution.
        """
        plain = torch.log_softmax(logits, dim=-1)
        known = plain[:, : self._vocabulary]
        if sampling.temperature == 0:
            token = known.argmax(-1)
        else:
            flatter = known
            if sampling.temperature != 1:
                # Relative to the largest, so that no temperature, however low, makes all of them -inf; and its
                # reciprocal, which is what a GPU multiplies by, has to be finite in float32.
                flatter = (known - known.amax(-1, keepdim=True)) / max(sampling.temperature, 1e-30)
            probabilities = torch.softmax(flatter, dim=-1)
            if sampling.top_p < 1:
                probabilities = _nucleus(probabilities, sampling.top_p)
            token = _pick(probabilities, generator)
        logprob = plain.gather(-1, token[:, None])[:, 0]
        # One NaN or infinity among the logits makes every log-prob of its row NaN.
        if not bool(torch.isfinite(logprob).all()):
            raise ModelError(
                "the model's logits are not finite, so nothing can be sampled: its weights are damaged or its numbers "
                "overflow; go back to an older checkpoint, or set model.dtype to float32"
            )
        return token, logprob


class _Decoding:
    """The sequences that are still being sampled: `alive` are their rows, `logits` [B, V] predict their next tokens."""

    def __init__(
        self, model: torch.nn.Module, prompts: Sequence[Sequence[int]], counts: list[int], device: str
    ) -> None:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            # Padding is on the left, so that every sequence's next token is in the last column.
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        self._model = model
        self._cache = DynamicCache(config=model.config)  # type: ignore[arg-type]
        self._mask = mask.to(device)
        self._positions = self._mask.sum(-1)
        self.logits = self._step(ids.to(device), (self._mask.cumsum(-1) - 1).clamp(min=0))
        repeat = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(counts)).to(device)
        self._select(repeat)
        self.logits = self.logits[repeat]
        self.alive = torch.arange(len(repeat), device=device)

    def advance(self, token: Tensor, keep: Tensor) -> None:
        """Append `token` [B] to the sequences that `keep` [B] and compute what comes next."""
        if not bool(keep.all()):
            chosen = keep.nonzero()[:, 0]
            self._select(chosen)
            self.alive, token = self.alive[chosen], token[chosen]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(token), 1)], dim=1)
        self.logits = self._step(token[:, None], self._positions[:, None])
        self._positions = self._positions + 1

    def _select(self, rows: Tensor) -> None:
        self._cache.batch_select_indices(rows)
        self._mask, self._positions = self._mask[rows], self._positions[rows]

    def _step(self, ids: Tensor, positions: Tensor) -> Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1].float()
        return logits


def _pick(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """One index for each row of [B, V], by inverting the cumulative distribution.

    One random number a row; torch.multinomial draws one for each entry, which took a fifth of a decoding step on a CPU.
    """
    # Single precision loses the rarest of a large vocabulary; Apple's GPUs have no other.
    dtype = torch.float32 if probabilities.device.type == "mps" else torch.float64
    cumulative = probabilities.to(dtype).cumsum(-1)
    # Strictly below the total, so that an entry of probability 0 is never picked.
    point = torch.rand(len(probabilities), 1, generator=generator, device=probabilities.device, dtype=dtype)
    return torch.searchsorted(cumulative, point * cumulative[:, -1:], right=True).clamp(max=probabilities.shape[1] - 1)[
        :, 0
    ]


def _nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens of each row that together reach `top_p` (arXiv 1904.09751); at least one."""
    ordered, indices = probabilities.sort(dim=-1, descending=True)
    surplus = ordered.cumsum(-1) - ordered >= top_p
    return torch.zeros_like(probabilities).scatter(-1, indices, ordered.masked_fill(surplus, 0.0))
