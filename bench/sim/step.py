"""The learning step of a stack of policies: what `rl.policy` does, for models so small that all fit memory at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.sim.adam import StackedAdam
from bench.sim.plan import Plan
from bench.sim.stack import StackedPolicy
from bench.sim.tasks import MAX_NEW_TOKENS
from rl.batches import Group
from rl.gate import Gate, likelihood
from rl.loss import TokenBatch, policy_loss, token_weights
from rl.rollouts import UpdateStats
from rl.settings import TrainingSettings

CLIP_LOW, CLIP_HIGH, MAX_NORM = 0.2, 0.28, 1.0
"""As the product has them by default."""


class Step:
    """One learning step of a whole stack: `rl.policy`'s, for small models that fit memory at once."""

    def __init__(self, plan: Plan, gates: Sequence[Gate], groups: Sequence[Sequence[Group]]) -> None:
        self._plan = plan
        self._gates = gates
        # What does not differ has no gradient.
        self._kept = [
            [(place, group) for place, group in enumerate(mine) if any(row.advantage for row in group.rows)]
            for mine in groups
        ]
        self._refused: list[dict[int, int]] = [{} for _ in gates]
        self._tokens = [0] * len(gates)
        self._thresholds = [gate.threshold for gate in gates]
        self.judged = 0
        """Completions of others that the gates have looked at."""
        self._norms = [0.0] * len(gates)
        self._rates = [plan.lr] * len(gates)

    def take(self, policy: StackedPolicy, adam: StackedAdam) -> None:
        """`epochs` steps; the ratio of the first is 1, those after are clipped."""
        if not any(self._kept):
            return
        groups = [[group for _, group in mine] for mine in self._kept]
        old: Tensor | None = None
        weights = torch.empty(0)
        schedule = TrainingSettings(lr=self._plan.lr, decay_after=self._plan.decay_after)
        for _ in range(self._plan.epochs):
            adam.lr = self._rates = [schedule.rate(step + 1) for step in adam.steps]
            scores = policy.scores(groups)
            if old is None:
                old = scores.logprobs.detach()
                weights = self._weights(old, scores.lengths)
            advantage = torch.tensor([row.advantage for mine in groups for group in mine for row in group.rows])
            spread = advantage.repeat_interleave(torch.tensor(scores.lengths))
            terms = policy_loss(TokenBatch(scores.logprobs, old, spread, weights), CLIP_LOW, CLIP_HIGH)
            terms.loss.backward()  # type: ignore[no-untyped-call]
            self._norms = adam.step([count > 0 for count in self._tokens], MAX_NORM)

    def _weights(self, logprobs: Tensor, lengths: Sequence[int]) -> Tensor:
        """The weight of each token: none for what the gate refuses, and nothing for it in the average."""
        values = [likelihood(part.tolist()) for part in torch.split(logprobs, list(lengths))]
        weights: list[float] = []
        row_number = 0
        for at, mine in enumerate(self._kept):
            kept: list[bool] = []
            sizes: list[int] = []
            for place, group in mine:
                count = len(group.rows)
                passed = self._passed(at, place, group, values[row_number : row_number + count])
                kept += passed
                sizes += [len(row.tokens) for row in group.rows]
                row_number += count
            trained = [size for size, keep in zip(sizes, kept, strict=True) if keep]
            self._tokens[at] = sum(trained)
            each = iter(token_weights(trained, "dapo", MAX_NEW_TOKENS) if trained else [])
            for size, keep in zip(sizes, kept, strict=True):
                weights += [next(each) if keep else 0.0] * size
        return torch.tensor(weights)

    def _passed(self, at: int, place: int, group: Group, values: Sequence[float]) -> list[bool]:
        # An own completion has the log-probs of its sampling.
        if not self._plan.gate or group.rows[0].sampled is not None:
            return [True] * len(group.rows)
        gate = self._gates[at]
        self.judged += sum(row.advantage > 0 for row in group.rows)
        refused = [row.advantage > 0 and gate.refuses(value) for row, value in zip(group.rows, values, strict=True)]
        if any(refused):
            self._refused[at][place] = sum(refused)
        positive = [row.advantage > 0 for row in group.rows]
        if all(bad for bad, good in zip(refused, positive, strict=True) if good):
            return [False] * len(group.rows)
        return [not bad for bad in refused]

    def stats(self, at: int) -> UpdateStats:
        """Of one node's step."""
        return UpdateStats(
            policy_step=0,
            tokens_trained=self._tokens[at],
            loss=0.0,
            clip_fraction=0.0,
            entropy=0.0,
            grad_norm=self._norms[at],
            kl=0.0,
            learning_rate=self._rates[at],
            engine_logprob_gap=None,
            token_budget=0,
            refused=tuple(self._refused[at]),
            refused_completions=sum(self._refused[at].values()),
            gate=self._thresholds[at],
        )
