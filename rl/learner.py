"""The learner: model, engine, policy and optimiser behind a handful of plain synchronous calls.

It is the only place that holds weights. The node reaches it through `rl.learner_child`, a process of its own. All
randomness derives from the seeds that calls are given, so weights, optimiser and what the gate has seen of own
completions are all there is to save.
"""

import importlib.metadata
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rl import machine
from rl.batches import Group, Row
from rl.engines.base import InferenceEngine, Sampled
from rl.engines.live import LiveEngine
from rl.errors import LearnerError, ModelError, PromptError, RankLost
from rl.gate import Gate, likelihood
from rl.leader import open_ranks
from rl.models import ResolvedModel, resolve
from rl.policy import Policy
from rl.prompts import Message, decode, encode_completion, render, render_messages
from rl.ranks import together
from rl.rollouts import Completion, RolloutGroup, Sampling, ScoredGroup, UpdateStats
from rl.saved import read_policy, save_policy, set_policy
from rl.settings import LearnerSettings
from rl.weights import write_tensors
from rl.work import Progress, Stop, check_stop, give_back_memory, never, no_progress
from verifiers.base import Task

log = logging.getLogger(__name__)

EXTERNAL_LENGTH = 4
"""How many times as long as an own completion may be one of another node. Its text takes more tokens where the own
tokenizer is coarser or finer, or its limit is larger; beyond this a few long answers would cost more time than all
own ones together."""

MIN_EXTERNAL_TOKENS = 128
"""So many tokens may always be trained on: they cost little, and a node that answers in a word reads those that use
sentences."""


class Learner:
    """See the module. `stop` is asked during long work; once it says yes, generate and update raise Stopped."""

    def __init__(self, settings: LearnerSettings, trained: str | None = None, *, stop: Stop = never) -> None:
        """Load the model. `trained` is the identity that an existing checkpoint was trained from.

        Raises ModelError, OutOfMemory.
        """
        if threads := settings.threads or _fewer_threads():
            torch.set_num_threads(threads)
        self.settings = settings
        self.policy = _open_policy(resolve(settings.model, trained), settings)
        self.tokenizer = self.policy.tokenizer
        self._live = LiveEngine(settings, self.policy)
        self._ahead: list[Task] = []
        # What is sampled is held against the policy that it is sampled from.
        self.policy.before_step = lambda: self._live.settle(self._stop)
        self._gate = Gate() if settings.training.gate else None
        self._stop = stop

    @property
    def engine(self) -> InferenceEngine:
        """What samples. Opened when it is first needed."""
        return self._live.engine

    def open_engine(self) -> None:
        """Open the engine now instead of at the first sampling. Raises EngineError, OutOfMemory."""
        log.info("engine %s: %s", self.engine.name, self._live.why)

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its completion together that can be sampled."""
        return min(self.policy.context, self.engine.context)

    def generate(
        self,
        tasks: Sequence[Task],
        sampling: Sampling,
        seed: int,
        *,
        base: bool = False,
        keep: bool = True,
        progress: Progress = no_progress,
    ) -> list[RolloutGroup]:
        """Sample a group for each task, in order. `base` asks the model before any training. Without `keep` the gap
        between engine and policy that is measured is not told by the next update: it is not that of a round.

        A task that does not fit the model's context is left out with a warning, so there may be fewer groups than
        tasks: each names its own. Raises PromptError if no task fits, Stopped, OutOfMemory, EngineError.
        """
        check_stop(self._stop)
        fitting = self._prompts(tasks, self.context - sampling.max_new_tokens)
        prompts = [prompt for _, prompt in fitting]
        sampled = self._live.generate(prompts, sampling, seed, base=base, stop=self._stop, progress=progress, keep=keep)
        return self._rollouts([task for task, _ in fitting], sampled, 0 if base else self.policy.step)

    def generate_ahead(
        self, tasks: Sequence[Task], sampling: Sampling, seed: int, *, progress: Progress = no_progress
    ) -> None:
        """Begin what `generate` does; `generated_ahead` gives it. An engine with weights of its own goes on with it
        through all but the last of an update, the optimiser's step; any other has done it on return.

        Raises as `generate` does.
        """
        check_stop(self._stop)
        fitting = self._prompts(tasks, self.context - sampling.max_new_tokens)
        self._live.begin([prompt for _, prompt in fitting], sampling, seed, stop=self._stop, progress=progress)
        self._ahead = [task for task, _ in fitting]

    def generated_ahead(self, *, progress: Progress = no_progress) -> tuple[list[RolloutGroup], float]:
        """What was begun last, and the seconds that sampling took. Raises Stopped, OutOfMemory, EngineError."""
        check_stop(self._stop)
        sampled, step, seconds = self._live.finish(self._stop, progress)
        return self._rollouts(self._ahead, sampled, step), seconds

    def _rollouts(self, tasks: Sequence[Task], sampled: Sequence[Sequence[Sampled]], step: int) -> list[RolloutGroup]:
        return [
            RolloutGroup(
                task,
                tuple(Completion(decode(self.tokenizer, s.tokens), s.finished, s.tokens, s.logprobs) for s in group),
                step,
            )
            for task, group in zip(tasks, sampled, strict=True)
        ]

    def _prompts(self, tasks: Sequence[Task], room: int) -> list[tuple[Task, list[int]]]:
        """The tasks that fit `room` tokens, each with its prompt. Raises PromptError if none of them does."""
        fitting: list[tuple[Task, list[int]]] = []
        problem: PromptError | None = None
        for task in tasks:
            try:
                fitting.append((task, render(self.tokenizer, self.settings.prompt, task, room)))
            except PromptError as error:
                log.warning("a task of %s is left out: %s", task.kind, error)
                problem = error
        if problem is not None and not fitting:
            raise problem
        return fitting

    def update(self, groups: Sequence[ScoredGroup], seed: int, *, progress: Progress = no_progress) -> UpdateStats:
        """One learning step on these groups, own and others' alike.

        A group that does not fit the model is left out with a warning, and so is what the likelihood gate refuses by
        what own completions, those of this update among them, are like. Raises TrainingError, OutOfMemory or Stopped,
        each with policy, optimiser and gate as they were. A learner told not to train raises TrainingError.
        """
        check_stop(self._stop)
        tokenised = self._tokenised(groups)
        gate = None if self._gate is None else _having_seen(self._gate, groups)
        if self.policy.ranks.size > 1:
            # The others would wait for this one.
            self._live.settle(self._stop)
        stats = self.policy.update(list(tokenised.values()), seed, gate=gate, stop=self._stop, progress=progress)
        self._gate = gate
        self._live.refresh()
        give_back_memory()
        vitals = self._live.take()
        # The one that was checked, if there is one: what is recorded is what was held against the limit.
        gap = stats.engine_logprob_gap if vitals.gap is None else vitals.gap
        places = list(tokenised)
        return replace(
            stats,
            engine_logprob_gap=gap,
            engine_restarts=vitals.restarts,
            seconds_sync=vitals.seconds_sync,
            refused=tuple(places[number] for number in stats.refused),
            gate=None if gate is None else gate.threshold,
        )

    def fits(self, groups: Sequence[ScoredGroup]) -> list[bool]:
        """Whether each of these groups of others is worth a place in an update.

        Its prompt has to fit the model's context, and of its completions one with a positive advantage: without any,
        what is left of a group only says what not to do.
        """
        fits: list[bool] = []
        for scored in groups:
            try:
                fits.append(any(row.advantage > 0 for row in self._group(scored).rows))
            except PromptError as error:
                log.debug("a group of %s does not fit: %s", scored.origin, error)
                fits.append(False)
        return fits

    def _tokenised(self, groups: Sequence[ScoredGroup]) -> dict[int, Group]:
        """What there is to train on, each by its place among `groups`."""
        kept: dict[int, Group] = {}
        for place, scored in enumerate(groups):
            if self.settings.training.zero_variance == "drop" and not any(scored.advantages):
                continue
            try:
                group = self._group(scored)
            except PromptError as error:
                log.warning("a group of %s is not trained on: %s", scored.origin, error)
                continue
            if group.rows:
                kept[place] = group
        return kept

    def _group(self, scored: ScoredGroup) -> Group:
        prompt = render(self.tokenizer, self.settings.prompt, scored.group.task, self.policy.context - 1)
        rows: list[Row] = []
        for completion, advantage in zip(scored.group.completions, scored.advantages, strict=True):
            if self.settings.training.truncated == "drop" and not completion.finished:
                continue
            # An own completion's ids are what was sampled; its text need not tokenise to the same.
            tokens, sampled = completion.tokens, completion.logprobs
            room = self.policy.context - len(prompt)
            external = tokens is None
            if tokens is None:
                tokens = tuple(encode_completion(self.tokenizer, completion.text, completion.finished))
                # Another tokenizer's log-probs, of whatever was sampled there.
                sampled = None
                room = min(room, self._longest_external)
            if len(tokens) > room:
                log.debug("a completion of %d tokens from %s is left out: too long", len(tokens), scored.origin)
            elif tokens:
                stale = sampled is not None and scored.group.policy_step != self.policy.step
                rows.append(Row(tokens, advantage, sampled, external, stale))
        return Group(tuple(prompt), tuple(rows))

    @property
    def _longest_external(self) -> int:
        """Most tokens of another's completion that are trained on: what it costs is ours, how long it is was not."""
        return max(EXTERNAL_LENGTH * self.settings.sampling.max_new_tokens, MIN_EXTERNAL_TOKENS)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        seed: int,
        *,
        base: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> Completion:
        """The policy's next turn in a chat, or the base model's. `say` gets its text piece by piece as it comes."""
        prompt = render_messages(self.tokenizer, messages)
        if len(prompt) + sampling.max_new_tokens > self.context:
            raise PromptError(f"the chat is {len(prompt)} tokens long, too much for this model: start a new one")
        tokens: list[int] = []
        said = ""

        def emit(token: int) -> None:
            nonlocal said
            tokens.append(token)
            text = decode(self.tokenizer, tokens)
            # A character may take several tokens; until the last has come it reads as U+FFFD.
            if say is not None and not text.endswith("\ufffd"):
                say(text[len(said) :])
                said = text

        one = Sampling(1, sampling.max_new_tokens, sampling.temperature, sampling.top_p)
        heard = None if say is None else emit
        [[s]] = self._live.generate(
            [prompt], one, seed, base=base, stop=self._stop, progress=no_progress, emit=heard, keep=False
        )
        return Completion(decode(self.tokenizer, s.tokens), s.finished, s.tokens, s.logprobs)

    def save(self, directory: Path) -> None:
        """Write policy, optimiser and gate into an existing directory: the adapter as peft reads it. Raises OSError."""
        save_policy(self.policy, self.settings.lora, self._gate.known if self._gate else [], directory)

    def load(self, directory: Path) -> None:
        """Take policy, optimiser and gate from what `save` wrote. Raises CheckpointError or OutOfMemory; nothing has
        changed then.
        """
        ranks = self.policy.ranks
        ranks.tell("load", directory=directory)
        saved = together(ranks, lambda: read_policy(self.policy, self.settings.lora, directory))
        set_policy(self.policy, saved)
        if self._gate is not None:
            self._gate = Gate(saved.known)
        self._live.refresh()

    def describe(self) -> dict[str, Any]:
        """What is running: plain values for a person or a log."""
        model, resolved = self.policy.model, self.policy.resolved
        return {
            "model": resolved.identity,
            "public_name": resolved.public_name,
            "location": str(resolved.location),
            "parameters": sum(p.numel() for n, p in model.named_parameters() if ".lora_" not in n),
            "trained_parameters": self.policy.weights.count,
            "dtype": str(resolved.dtype).removeprefix("torch."),
            "device": resolved.device,
            "context": self.policy.context,
            **self._live.describe(),
            "policy_step": self.policy.step,
            "token_budget": self.policy.token_budget,
            "ranks": self.policy.ranks.size,
            "threads": torch.get_num_threads(),
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")},
        }

    def export(self, directory: Path, *, merged: bool) -> None:
        """Write the policy for others into an existing directory: safetensors, configuration and tokenizer.

        `merged` gives a whole model that transformers loads by itself, otherwise the adapter that peft puts on the base
        model. Raises ModelError if there is no adapter, OSError.
        """
        if merged:
            write_tensors(self.policy.weights.merged_state(), directory / "model.safetensors")
            self.policy.model.config.save_pretrained(directory)
            self.policy.model.generation_config.save_pretrained(directory)
        elif self.settings.lora.rank == 0:
            raise ModelError("this policy has no adapter (lora.rank is 0): export the merged model")
        else:
            self.policy.weights.save(directory)
        self.tokenizer.save_pretrained(directory)

    def close(self) -> None:
        """Give back what the engine holds, and end the other ranks."""
        self._live.close()
        self.policy.ranks.close()


def _having_seen(gate: Gate, groups: Sequence[ScoredGroup]) -> Gate:
    """The gate after the own completions of these groups; the one that is given stays as it is."""
    own = [c.logprobs for s in groups for c in s.group.completions if c.tokens is not None and c.logprobs]
    gate = Gate(gate.known)
    gate.observe(map(likelihood, own))
    return gate


def _fewer_threads() -> int:
    """How many threads to compute with where a container may use fewer cores than torch counts; else 0."""
    allowed = machine.cpus()
    return allowed if allowed < torch.get_num_threads() else 0


def _open_policy(resolved: ResolvedModel, settings: LearnerSettings) -> Policy:
    """A policy, and the other ranks that train it."""
    ranks = open_ranks(settings, resolved)
    try:
        policy = Policy(resolved, settings, ranks)
        ranks.join()
    except (LearnerError, RankLost, OSError):
        ranks.close()
        raise
    return policy
