"""An engine that is live or loud: what it samples is held against the policy, and one that fails is replaced once."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl.batches import Group, Row
from rl.engines.ahead import Ahead
from rl.engines.base import Emit, InferenceEngine, Sampled
from rl.engines.opening import open_engine
from rl.errors import EngineError, OutOfMemory
from rl.policy import Policy
from rl.rollouts import Sampling
from rl.settings import LearnerSettings
from rl.work import Progress, Stop, first_line, no_progress

log = logging.getLogger(__name__)

FEW_GROUPS, FEW_TOKENS = 2, 128
"""The first look: at most so many groups, other ones after each update, until so many tokens. It costs a twentieth of
the sampling, where all tokens would cost nearly half: each prompt is computed again."""

MANY_TOKENS = 1000
"""The second look, before anything is called wrong: about so many tokens of all groups."""

ENOUGH_TOKENS = 200
"""A mean over fewer, of all there are, has to be above the limit by three times its standard error."""

Open = Callable[[LearnerSettings, Policy], tuple[InferenceEngine, str]]


@dataclass(frozen=True, slots=True)
class Vitals:
    """What happened to the engine since it was last asked. `gap` is the mean absolute difference in nats, if known."""

    gap: float | None
    restarts: int
    seconds_sync: float


@dataclass(slots=True)
class _Begun:
    """A sampling ahead: `ahead` while it goes on, then `found` with its gap and the policy's `step`, or neither if it
    has failed."""

    prompts: Sequence[Sequence[int]]
    sampling: Sampling
    seed: int
    ahead: Ahead | None = None
    found: tuple[list[list[Sampled]], float | None] | None = None
    step: int = 0
    seconds: float = 0.0


class LiveEngine:
    """Opens the engine when it is first needed, and checks each sampling. See `InferenceEngine` for its methods."""

    def __init__(self, settings: LearnerSettings, policy: Policy, opening: Open = open_engine) -> None:
        self._settings = settings
        self._policy = policy
        self._opening = opening
        self._engine: InferenceEngine | None = None
        self._begun: _Begun | None = None
        self._gap: float | None = None
        self._restarts = 0
        self._seconds_sync = 0.0
        self.why = ""

    @property
    def engine(self) -> InferenceEngine:
        """The engine, opened if it was not. Raises EngineError, OutOfMemory."""
        if self._engine is None:
            self._engine, self.why = self._opening(self._settings, self._policy)
        return self._engine

    def describe(self) -> dict[str, Any]:
        """Its name, why it is this one, and what it says of itself. Opens it if it was not."""
        return {"engine": self.engine.name, "engine_why": self.why, "engine_about": self.engine.about()}

    def refresh(self) -> None:
        """The policy's weights have changed."""
        if self._engine is not None:
            self._engine.refresh()

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
        keep: bool = True,
    ) -> list[list[Sampled]]:
        """See `InferenceEngine.generate`. `keep` has `take` tell the gap that is measured.

        An engine that fails, or does not sample from the policy, is replaced and asked again; if it fails again,
        EngineError or OutOfMemory is raised. What was emitted cannot be taken back: then the first failure is raised.
        """
        # It samples for one at a time.
        self.settle(stop)
        sampled, gap = self._generate(prompts, sampling, seed, base=base, stop=stop, progress=progress, emit=emit)
        if keep and not base:
            self._gap = gap
        return sampled

    def begin(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, *, stop: Stop, progress: Progress
    ) -> None:
        """Begin what `generate` does, for `finish` to give. An engine that is not `apart` has done it on return.

        Before the policy changes it has to be settled. Raises Stopped, OutOfMemory, EngineError.
        """
        self._drop()
        begun = _Begun(prompts, sampling, seed)
        if self.engine.apart:
            try:
                # By this thread, which knows that the weights stay as they are meanwhile.
                self.engine.hand_over()
            except (EngineError, OutOfMemory) as error:
                self._replace(error)
            else:
                sample = partial(self.engine.generate, prompts, sampling, seed, progress=no_progress)
                begun.ahead = Ahead(lambda stop: sample(stop=stop))
        else:
            self._sample_now(begun, stop, progress)
        self._begun = begun

    def settle(self, stop: Stop) -> None:
        """Wait until nothing is sampled any more, and hold what was against the policy. Raises Stopped.

        What has failed is sampled again by `finish`.
        """
        begun = self._begun
        if begun is None or begun.ahead is None:
            return
        try:
            sampled, begun.seconds = begun.ahead.result(stop)
            begun.step = self._policy.step
            begun.found = sampled, self._check(begun.prompts, sampled, False, stop)
        except (EngineError, OutOfMemory) as error:
            self._replace(error)
        begun.ahead.close()
        begun.ahead = None

    def finish(self, stop: Stop, progress: Progress) -> tuple[list[list[Sampled]], int, float]:
        """What `begin` began, the policy's step that it was sampled at, and the seconds it took. Raises Stopped,
        OutOfMemory, EngineError.
        """
        self.settle(stop)
        begun, self._begun = self._begun, None
        if begun is None:
            raise EngineError("no sampling has been begun")
        found = begun.found or self._sample_now(begun, stop, progress)
        sampled, self._gap = found
        return sampled, begun.step, begun.seconds

    def _sample_now(self, begun: _Begun, stop: Stop, progress: Progress) -> tuple[list[list[Sampled]], float | None]:
        began = time.monotonic()
        begun.step = self._policy.step
        begun.found = self._generate(begun.prompts, begun.sampling, begun.seed, stop=stop, progress=progress)
        begun.seconds = time.monotonic() - began
        return begun.found

    def _drop(self) -> None:
        """End what was begun and is not wanted any more."""
        begun, self._begun = self._begun, None
        if begun is not None and begun.ahead is not None:
            begun.ahead.close()

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seed: int,
        *,
        base: bool = False,
        stop: Stop,
        progress: Progress,
        emit: Emit | None = None,
    ) -> tuple[list[list[Sampled]], float | None]:
        """See `generate`; and the gap."""
        said = 0

        def tell(token: int) -> None:
            nonlocal said
            said += 1
            if emit is not None:
                emit(token)

        for attempt in (1, 2):
            try:
                sampled = self.engine.generate(
                    prompts, sampling, seed, base=base, stop=stop, progress=progress, emit=emit and tell
                )
                return sampled, self._check(prompts, sampled, base, stop)
            except (EngineError, OutOfMemory) as error:
                self._replace(error)
                if attempt == 2 or said:
                    raise
        raise AssertionError("unreachable")

    def take(self) -> Vitals:
        """What happened since the last call; the gap is that of the last sampling since then."""
        vitals = Vitals(self._gap, self._restarts, self._seconds_sync + self._sync_of_engine())
        self._gap, self._restarts, self._seconds_sync = None, 0, -self._sync_of_engine()
        return vitals

    def close(self) -> None:
        """Give back what the engine holds, after it has ended what it may be doing."""
        self._drop()
        self._close()

    def _close(self) -> None:
        if self._engine is not None:
            self._seconds_sync += self._sync_of_engine()
            engine, self._engine = self._engine, None
            engine.close()

    def _sync_of_engine(self) -> float:
        return self._engine.seconds_sync if self._engine is not None else 0.0

    def _replace(self, error: EngineError | OutOfMemory) -> None:
        log.warning("the engine is closed and will be opened anew: %s", first_line(error))
        # Its traceback holds what the engine held.
        error.__traceback__ = None
        error.__cause__ = error.__context__ = None
        self._close()
        self._restarts += 1

    def _check(
        self, prompts: Sequence[Sequence[int]], sampled: list[list[Sampled]], base: bool, stop: Stop
    ) -> float | None:
        """The mean gap; None without any token. Raises EngineError if the engine's log-probs are not the policy's."""
        limit = self._settings.engine.max_logprob_gap
        gaps = self._gaps(a_few(prompts, sampled, self._policy.step), base, stop)
        if not len(gaps):
            return None
        if float(gaps.mean()) <= limit:
            return float(gaps.mean())
        gaps = self._gaps(many(prompts, sampled), base, stop)
        gap = float(gaps.mean())
        slack = 0.0 if len(gaps) >= ENOUGH_TOKENS else 3 * float(gaps.std(correction=0)) / math.sqrt(len(gaps))
        # Written so that a gap that is no number fails.
        if not gap - slack <= limit:
            raise EngineError(
                f"the engine does not sample from the policy: log-probs of the same {len(gaps)} tokens differ by "
                f"{gap:.3f} nats on average, more than engine.max_logprob_gap = {limit:g}"
            )
        return gap

    def _gaps(self, groups: Sequence[Group], base: bool, stop: Stop) -> Tensor:
        """How far engine and policy are apart on each token of the groups' completions, in nats, [N]."""
        if not groups:
            return torch.zeros(0)
        scored = self._policy.logprobs(groups, base=base, stop=stop)
        rows = [row for group in groups for row in group.rows]
        return torch.cat([(scored[row].cpu() - torch.tensor(row.sampled)).abs() for row in rows])


def a_few(prompts: Sequence[Sequence[int]], sampled: Sequence[Sequence[Sampled]], turn: int) -> list[Group]:
    """Whole completions of up to FEW_GROUPS groups, until they have FEW_TOKENS tokens. `turn` rotates the groups."""
    spoken = [place for place, group in enumerate(sampled) if any(one.tokens for one in group)]
    found: list[Group] = []
    tokens = 0
    for number in range(min(FEW_GROUPS, len(spoken))):
        rows: list[Row] = []
        place = spoken[(FEW_GROUPS * turn + number) % len(spoken)]
        for one in sampled[place]:
            if one.tokens and tokens < FEW_TOKENS:
                rows.append(Row(one.tokens, 0.0, one.logprobs))
                tokens += len(one.tokens)
        if rows:
            found.append(Group(tuple(prompts[place]), tuple(rows)))
    return found


def many(prompts: Sequence[Sequence[int]], sampled: Sequence[Sequence[Sampled]]) -> list[Group]:
    """Whole completions, one of each group in turn, until they have MANY_TOKENS tokens."""
    rows: list[list[Row]] = [[] for _ in prompts]
    tokens = 0
    for turn in range(max(map(len, sampled), default=0)):
        for place, group in enumerate(sampled):
            if tokens >= MANY_TOKENS:
                break
            if turn < len(group) and group[turn].tokens:
                rows[place].append(Row(group[turn].tokens, 0.0, group[turn].logprobs))
                tokens += len(group[turn].tokens)
    return [Group(tuple(prompt), tuple(found)) for prompt, found in zip(prompts, rows, strict=True) if found]
