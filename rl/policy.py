"""The policy: a language model, what of it trains, its optimiser, and the learning step on groups of token ids.

Invariants. The model is always in eval mode, so dropout never makes a training log-prob differ from a sampled one.
An update either happens completely or, whatever stops it, leaves weights and optimiser as they were. Several ranks
(`rl.ranks`) make the same update, each with its share of the micro-batches.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.attention import use_own_attention
from rl.batches import Group, Row, share_out, size
from rl.errors import ModelError, OutOfMemory, RankLost, Stopped, TrainingError
from rl.gate import Gate
from rl.gating import Screen, without
from rl.loss import policy_loss, token_weights
from rl.models import ResolvedModel
from rl.optimizer import copy_state, farthest, make_adamw, set_state
from rl.ranks import Alone, Ranks, together
from rl.rollouts import UpdateStats
from rl.scorer import Scorer
from rl.settings import LearnerSettings
from rl.totals import Known, Totals
from rl.weights import Weights
from rl.work import Progress, Stop, check_stop, first_line, is_out_of_memory, never, no_progress, out_of_memory_as

log = logging.getLogger(__name__)

LARGEST = torch.finfo(torch.bfloat16).max

TOO_LARGE = (
    "do not fit in memory: take a smaller model, train an adapter (lora.rank above 0) or give the machine more memory"
)

T = TypeVar("T")


class Policy:
    """A model that is trained. `step` counts optimiser steps, `token_budget` is the one in force."""

    def __init__(self, resolved: ResolvedModel, settings: LearnerSettings, ranks: Ranks | None = None) -> None:
        """Load the model. `ranks` are those that make its updates. Raises ModelError, OutOfMemory."""
        self.resolved = resolved
        self.ranks = Alone() if ranks is None else ranks
        self.settings = settings.training
        self.max_new_tokens = settings.sampling.max_new_tokens
        self.before_step: Callable[[], None] = lambda: None
        """Called before each optimiser step, when all gradients are there. It may raise Stopped."""
        self.step = 0
        self.token_budget = settings.training.tokens_at_once(resolved.device)
        with out_of_memory_as(f"{resolved.identity} and its optimiser {TOO_LARGE}"):
            self._build(settings)

    def _build(self, settings: LearnerSettings) -> None:
        resolved = self.resolved
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(str(resolved.location), trust_remote_code=False)
            self.model = self._load()
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{resolved.location} cannot be loaded as a language model: {error}") from error
        if self.tokenizer.eos_token_id is None:
            raise ModelError(f"the tokenizer of {resolved.identity} has no EOS token, so completions could not end")
        self.weights = Weights(
            self.model, settings.lora, resolved.public_name, settings.seed, self._load, keep_base=self.settings.kl > 0
        )
        self._optimizer = make_adamw(self.weights.masters, self.settings.betas) if self.settings.train else None
        self.kept_optimizer = b""
        """Of a policy that does not train: the optimiser of its checkpoint, for when it does."""
        self.scorer = Scorer(self.model, resolved)
        self.scorer.find_packing(len(self.tokenizer))

    def _load(self) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(self.resolved.location), dtype=self.resolved.dtype, trust_remote_code=False, use_safetensors=True
        )
        model.to(self.resolved.device).eval()
        use_own_attention(model)
        return model

    @property
    def trains(self) -> bool:
        """Whether it has an optimiser."""
        return self._optimizer is not None

    @property
    def optimizer(self) -> torch.optim.AdamW:
        """What makes its steps. Raises TrainingError if it `trains` not."""
        if self._optimizer is None:
            raise TrainingError("this node was told not to train: set training.train to true")
        return self._optimizer

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its completion together."""
        return int(getattr(self.model.config, "max_position_embeddings", 2**31))

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Token ids that end a completion."""
        configured = self.model.generation_config.eos_token_id
        several = configured if isinstance(configured, list) else [configured]
        return frozenset(int(t) for t in [*several, self.tokenizer.eos_token_id] if t is not None)

    # Log-probs

    def logprobs(self, groups: Sequence[Group], *, base: bool = False, stop: Stop = never) -> dict[Row, Tensor]:
        """Log-probs (nats, float32, [tokens of the row]) of every row under the policy, or the base model.

        This rank alone computes them. Raises Stopped, and OutOfMemory if even the longest row alone does not fit.
        """
        with torch.no_grad(), self.weights.base() if base else nullcontext():
            return self._within_memory(lambda: self._logprobs(self._plan(groups, 1)[0], stop), groups, 1)

    def _shared_logprobs(self, groups: Sequence[Group], *, base: bool, stop: Stop) -> dict[Row, Tensor]:
        """What `logprobs` gives, computed by all ranks."""
        if self.ranks.size == 1:
            return self.logprobs(groups, base=base, stop=stop)
        with torch.no_grad(), self.weights.base() if base else nullcontext():
            own = self._within_memory(
                lambda: together(self.ranks, lambda: self._logprobs(self._share(groups), stop)), groups
            )
        rows = [row for group in groups for row in group.rows]
        numbers = {row: number for number, row in enumerate(rows)}
        found = self.ranks.gather([(numbers[row], values.cpu().numpy()) for row, values in own.items()])
        device = self.resolved.device
        return {rows[number]: torch.from_numpy(v).to(device) for part in found for number, v in part}

    def _plan(self, groups: Sequence[Group], ranks: int) -> list[list[list[Group]]]:
        return share_out(groups, self.token_budget, ranks, packing=self.scorer.packing)

    def _share(self, groups: Sequence[Group]) -> list[list[Group]]:
        """The micro-batches of this rank."""
        return self._plan(groups, self.ranks.size)[self.ranks.rank]

    def _logprobs(self, batches: Sequence[list[Group]], stop: Stop) -> dict[Row, Tensor]:
        known: dict[Row, Tensor] = {}
        for parts in batches:
            check_stop(stop)
            batch = self.scorer.collate(parts)
            known.update(zip(batch.rows, torch.split(self.scorer.score(batch)[0], batch.lengths), strict=True))
        return known

    def _within_memory(self, work: Callable[[], T], groups: Sequence[Group], ranks: int | None = None) -> T:
        """Do `work`, which plans `groups` by the token budget, halving the budget as often as memory runs out.

        `ranks` is how many share the work: all of them unless it is given.
        """
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            # Outside the handler, where the traceback no longer holds the tensors. Log-probs have no gradients, and
            # may be asked for when those of a step are complete.
            if torch.is_grad_enabled():
                self.weights.zero_grad()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            planned = self._plan(groups, ranks or self.ranks.size)
            largest = max(size(batch, packing=self.scorer.packing) for share in planned for batch in share)
            longest = max(len(g.prompt) + len(row.tokens) - 1 for g in groups for row in g.rows)
            if largest <= longest:
                # It saves what is kept for gradients.
                if not (torch.is_grad_enabled() and self.scorer.compute_twice()):
                    raise OutOfMemory(
                        f"memory ran out on a single completion of {longest} tokens ({reason}): lower "
                        "sampling.max_new_tokens, lora.rank or the model's size, or give the machine more memory"
                    )
                log.warning(
                    "memory ran out on a single completion of %d tokens (%s): layers are computed twice from now on, "
                    "which takes less memory and more time",
                    longest,
                    reason,
                )
                continue
            self.token_budget = max(largest // 2, 1)
            log.warning("memory ran out (%s): the token budget is now %d", reason, self.token_budget)

    # The learning step

    def update(
        self,
        groups: Sequence[Group],
        seed: int,
        *,
        gate: Gate | None = None,
        stop: Stop = never,
        progress: Progress = no_progress,
    ) -> UpdateStats:
        """Train on `groups`: `epochs` passes of `minibatches` optimiser steps each, in an order drawn from `seed`.

        Groups whose advantages are all zero cost no pass. With a `gate` all is as if what it refuses (see `rl.gating`)
        had never been given. Without any gradient to follow nothing changes. Raises TrainingError, OutOfMemory or
        Stopped, each with policy and optimiser as they were. `progress` moves by micro-batches and counts completion
        tokens, each once an epoch.
        """
        live = self._with_gradient(groups)
        if not live:
            return self._stats([], Totals(), 0)
        self.ranks.tell("update", groups=groups, seed=seed, gate=gate, token_budget=self.token_budget)
        screen = Screen(gate, live)
        with self.ranks.computing():
            stats = self._update(groups, seed, screen, stop, progress)
        refused = [place for place, group in enumerate(groups) if not screen.refused.isdisjoint(group.rows)]
        return replace(stats, refused=tuple(refused), refused_completions=len(screen.refused))

    def _update(
        self, groups: Sequence[Group], seed: int, screen: Screen, stop: Stop, progress: Progress
    ) -> UpdateStats:
        steps = self._steps(groups, seed)
        known, first = Known(), Totals()
        # With a single step the old policy is the one that trains. Where there may be several, which groups share one
        # depends on which groups there are, so it has to be known first what is refused.
        several = len(steps) > 1 or (screen.judges and self.settings.epochs * self.settings.minibatches > 1)
        if several:
            known.old = self._shared_logprobs(self._with_gradient(groups), base=False, stop=stop)
            for row, logprobs in known.old.items():
                first.add_gap(row, logprobs)
            screen.look(list(known.old), list(known.old.values()))
            screen.agree(self.ranks)
            groups = without(groups, screen.out)
            steps = self._steps(groups, seed)
        if self.settings.kl > 0 and steps:
            known.reference = self._shared_logprobs(self._with_gradient(groups), base=True, stop=stop)
        totals: list[Totals] = []
        planned = sum(group.trained for step in steps for group in self._with_gradient(step))

        def tell(done: int) -> None:
            progress(sum(total.tokens for total in totals) + done, planned, "tokens")

        with self._undone_on_error(several=len(steps) > 1):
            for step in steps:
                totals += self._optimiser_step(step, known, Screen(None, ()) if several else screen, stop, tell)
        trained = sum(group.trained for group in self._with_gradient(without(groups, screen.out)))
        return self._stats(totals, first if several else Totals.of(totals), trained)

    def _with_gradient(self, groups: Sequence[Group]) -> list[Group]:
        return [group for group in groups if self.settings.kl > 0 or any(row.advantage != 0 for row in group.rows)]

    def _steps(self, groups: Sequence[Group], seed: int) -> list[list[Group]]:
        """The groups of each optimiser step, without those steps that would have no gradient."""
        random = Random(seed)
        count = min(self.settings.minibatches, len(groups))
        orders = [random.sample(list(groups), len(groups)) for _ in range(self.settings.epochs)]
        steps = [order[start::count] for order in orders for start in range(count)]
        return [step for step in steps if self._with_gradient(step)]

    @contextmanager
    def _undone_on_error(self, *, several: bool) -> Iterator[None]:
        # A single step changes nothing before all that can fail has succeeded, so it needs no copy.
        step = self.step
        saved = together(self.ranks, self._copy) if several else None
        try:
            yield
        except (TrainingError, OutOfMemory, Stopped):
            self.weights.zero_grad()
            if saved is not None and self.step != step:
                self.weights.restore(saved[0])
                set_state(self.optimizer, saved[1])
                self.step = step
            raise

    def _copy(self) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        with out_of_memory_as("no memory for a copy of what trains: set training.epochs and training.minibatches to 1"):
            return self.weights.snapshot(), copy_state(self.optimizer)

    def _optimiser_step(
        self, groups: Sequence[Group], known: Known, screen: Screen, stop: Stop, tell: Callable[[int], None]
    ) -> list[Totals]:
        """One step; none if `screen` leaves nothing to learn, and then nothing has changed."""
        weights = self._token_weights(groups)
        live = self._with_gradient(groups)

        def accumulate() -> tuple[Totals, list[bool]]:
            share = self._share(live)
            own = sum(part.trained for batch in share for part in batch)
            part = sum(group.trained for group in live) / max(1, own)
            screen.begin()
            totals = self._accumulate(share, weights, known, screen, stop, lambda done: tell(round(done * part)))
            return totals, self.weights.complete_grad() if self.ranks.size > 1 else []

        own, reached = self._within_memory(lambda: together(self.ranks, accumulate), live)
        screen.agree(self.ranks)
        kept = without(groups, screen.out)
        if not self._with_gradient(kept):
            self.weights.zero_grad()
            return []
        if screen.late:
            return self._optimiser_step(kept, known, Screen(None, ()), stop, tell)
        totals = self._add_up(own, reached)
        self._reweigh(totals, weights, self._token_weights(kept))
        self.before_step()
        with out_of_memory_as(f"the gradients {TOO_LARGE}"):
            totals.norm = self._apply()
        self.step += 1
        self.weights.zero_grad()
        self.weights.publish()
        return [totals]

    def _token_weights(self, groups: Sequence[Group]) -> dict[Row, float]:
        """The weight of each token of each row in the loss of a step on these groups."""
        rows = [row for group in groups for row in group.rows]
        each = token_weights([len(row.tokens) for row in rows], self.settings.loss, self.max_new_tokens)
        return dict(zip(rows, each, strict=True))

    def _reweigh(self, totals: Totals, used: Mapping[Row, float], right: Mapping[Row, float]) -> None:
        """Make the gradients and the loss of the rows of `right` what they are by these weights, not by those `used`.

        Token weights are something of the row's own times a number of the step, so all differ by one factor.
        """
        row = next(iter(right))
        if used[row] == right[row]:
            return
        factor = right[row] / used[row]
        totals.loss *= factor
        for master in self.weights.masters:
            if master.grad is not None:
                master.grad.mul_(factor)

    def _add_up(self, own: Totals, reached: Sequence[bool]) -> Totals:
        """Make this rank's gradients and totals those of all ranks. Raises RankLost if their weights differ."""
        if self.ranks.size == 1:
            return own
        totals, digests, reaches = zip(*self.ranks.gather((own, self.weights.digest(), reached)), strict=True)
        if len(set(digests)) > 1:
            raise RankLost("the ranks of this learner hold different weights: their gradients cannot be added up")
        # A weight without any gradient is not to decay, as with a single rank.
        for master, *reach in zip(self.weights.masters, *reaches, strict=True):
            master.grad = master.grad if any(reach) else None
        self.ranks.sum([master.grad for master in self.weights.masters if master.grad is not None])
        return Totals.of(totals)

    def _apply(self) -> float:
        """Step along the gradients, clipped; returns their norm before. Nothing has changed if it raises."""
        masters, limit = self.weights.masters, self.settings.max_grad_norm
        gradients = [master.grad for master in masters if master.grad is not None]
        norm = together(self.ranks, lambda: float(torch.nn.utils.get_total_norm(gradients)))
        # Sums over threads round by their number, and all ranks have to scale by the same.
        norm = self.ranks.gather(norm)[0]
        torch.nn.utils.clip_grads_with_norm_(masters, limit, torch.tensor(norm))
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradient's norm is {norm}: this update was not made; lower training.lr if it recurs"
            )
        for setting in self.optimizer.param_groups:
            setting.update(lr=self.learning_rate, weight_decay=self.settings.weight_decay, betas=self.settings.betas)
        # A bfloat16 copy of a weight is the first to overflow.
        if not together(self.ranks, lambda: farthest(self.optimizer, min(norm, limit))) < LARGEST:
            raise TrainingError(
                "the weights, or what the optimiser remembers, are not finite or about to leave the range of numbers: "
                "this update was not made; go back to an older checkpoint and lower training.lr"
            )
        together(self.ranks, self.optimizer.step)
        return norm

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next optimiser step."""
        return self.settings.rate(self.step + 1)

    def _accumulate(
        self,
        batches: Sequence[list[Group]],
        weights: Mapping[Row, float],
        known: Known,
        screen: Screen,
        stop: Stop,
        tell: Callable[[int], None],
    ) -> Totals:
        """Gradients from none over these micro-batches. `tell` gets the tokens done, from 0."""
        self.weights.zero_grad()
        totals = Totals()
        done = 0
        tell(done)
        check_stop(stop)
        for parts in batches:
            check_stop(stop)
            batch = self.scorer.collate(parts)
            rows, logprobs, entropy = screen.sift(batch.rows, *self.scorer.score(batch))
            if rows:
                terms = policy_loss(
                    known.token_batch(rows, logprobs, weights),
                    self.settings.clip_low,
                    self.settings.clip_high,
                    self.settings.kl,
                )
                self._follow(terms.loss)
                totals.add(rows, terms, logprobs.detach(), entropy)
            done += len(batch.targets)
            tell(done)
        return totals

    def _follow(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss."""
        if not math.isfinite(float(loss.detach())):
            raise TrainingError(
                f"the loss is {float(loss.detach())}: this update was not made; lower training.lr if it recurs"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        self.weights.collect_grad()

    def _stats(self, totals: list[Totals], first: Totals, trained: int) -> UpdateStats:
        whole, steps = Totals.of(totals), max(1, len(totals))
        tokens = max(1, whole.tokens)
        return UpdateStats(
            policy_step=self.step,
            tokens_trained=trained,
            loss=whole.loss / steps,
            clip_fraction=whole.clipped / tokens,
            entropy=whole.entropy / tokens,
            grad_norm=whole.norm / steps,
            kl=whole.kl / tokens,
            learning_rate=self.settings.rate(self.step),
            engine_logprob_gap=first.gap / first.gap_tokens if first.gap_tokens else None,
            token_budget=self.token_budget,
        )
