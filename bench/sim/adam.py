"""Adam for stacked policies: each node has its own moments, step count, learning rate and gradient norm."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.sim.stack import StackedPolicy


class StackedAdam:
    """torch's AdamW without weight decay, on each node's slices of the stacked weights.

    `lr` holds one learning rate a node; setting it to a float sets all of them. `steps` counts each node's steps.
    """

    def __init__(
        self,
        policy: StackedPolicy,
        lr: float | Sequence[float],
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self._weights = list(policy.weights.values())
        self._betas, self._eps = betas, eps
        self._optimizers = [self._fresh(node) for node in range(policy.nodes)]
        self.lr = lr
        self.steps = [0] * policy.nodes

    def _fresh(self, node: int) -> torch.optim.AdamW:
        slices = [weight.detach()[node] for weight in self._weights]
        return torch.optim.AdamW(slices, lr=0.0, betas=self._betas, eps=self._eps, weight_decay=0.0, fused=True)

    @property
    def lr(self) -> Sequence[float]:
        return self._lr

    @lr.setter
    def lr(self, lr: float | Sequence[float]) -> None:
        count = len(self._optimizers)
        rates = [float(lr)] * count if isinstance(lr, int | float) else list(lr)
        if len(rates) != count:
            raise ValueError(f"there are {count} nodes and {len(rates)} learning rates")
        self._lr = rates

    def step(self, active: Sequence[bool] | None = None, max_norm: float = 1.0) -> list[float]:
        """One step of the active nodes (None: all) with the weights' gradients, which are gone afterwards.

        Each node's gradient is scaled down to `max_norm` by its own norm over all its weights. Returns those norms from
        before, 0 for nodes that take no step. The others' weights, moments and step counts stay as they are. Raises
        FloatingPointError, before any node has moved, if an active node's gradient is not finite.
        """
        gradients = [weight.grad for weight in self._weights]
        chosen = [node for node in range(len(self._optimizers)) if active is None or active[node]]
        norms = [0.0] * len(self._optimizers)
        for node in chosen:
            slices = self._slices(node)
            for piece, gradient in zip(slices, gradients, strict=True):
                piece.grad = None if gradient is None else gradient[node]
            norms[node] = float(torch.nn.utils.clip_grad_norm_(slices, max_norm, foreach=True))
        broken = [node for node in chosen if not norms[node] < float("inf")]
        if broken:
            raise FloatingPointError(f"the gradient of nodes {broken} is not finite")
        for node in chosen:
            self._optimizers[node].param_groups[0]["lr"] = self._lr[node]
            self._optimizers[node].step()
            self._optimizers[node].zero_grad()
            self.steps[node] += 1
        for weight in self._weights:
            weight.grad = None
        return norms

    def reset(self, node: int) -> None:
        """Forget a node's moments and step count."""
        self._optimizers[node] = self._fresh(node)
        self.steps[node] = 0

    def _slices(self, node: int) -> list[Tensor]:
        slices: list[Tensor] = self._optimizers[node].param_groups[0]["params"]
        return slices
