"""Adapters of a bfloat16 model, run as a part of the weights they adapt.

A layer's output in bfloat16 has eight bits, so the small output of a young adapter, added to it, is rounded away: with
SmolLM2-135M seven parts in a hundred of what one update changed were left, and half after five (docs/LOG.md). Added to
the weights in float32, and these rounded once, it comes through, provided that the rounding does not always go to the
nearest: an adapter's share of a weight is mostly below half a unit in its last place. So a fixed pattern of noise is
added before the rest is cut off, which keeps the mean over many weights right, and leaves a weight without a share as
it was. The engine is given the very same weights, so both compute one policy.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

PATTERN = 2**21
"""Numbers in the pattern of noise; it repeats in a larger layer and begins elsewhere in each."""

STRIDE = 611_953
"""How far the pattern's beginnings of two neighbouring layers are apart; shares no factor with its length."""

_LOW = 16
"""Bits that a float32 has more than a bfloat16."""


class MergedAdapters:
    """Takes over the forward pass of adapted layers, and keeps the weights they run on."""

    def __init__(self, layers: Sequence[LoraLinear], masters: Mapping[int, Tensor]) -> None:
        """`layers` have bfloat16 weights; `masters` has the float32 value of each adapter weight by its `id`."""
        generator = torch.Generator().manual_seed(0)
        noise = torch.randint(0, 2**_LOW, (PATTERN,), dtype=torch.int32, generator=generator)
        # Twice, so that a pattern can begin anywhere without being copied.
        self._noise = torch.cat([noise, noise])
        self._layers = list(layers)
        self._masters = masters
        self._weights = {id(layer): layer.base_layer.weight.detach().clone() for layer in layers}
        for layer in layers:
            layer.forward = partial(_forward, layer, self._weights[id(layer)])
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the weights up to the adapters' masters."""
        for number, layer in enumerate(self._layers):
            a, b = (self._masters[id(w)] for w in _adapter(layer))
            whole = torch.addmm(layer.base_layer.weight.float(), b, a, alpha=layer.scaling["default"])
            begin = -STRIDE * number % PATTERN
            _cut(whole.view(-1), self._noise[begin : begin + PATTERN])
            self._weights[id(layer)].copy_(whole)

    def weight(self, layer: LoraLinear) -> Tensor | None:
        """The weight that a layer runs on; None for one that is not run here."""
        return self._weights.get(id(layer))


def mergeable(model: nn.Module) -> list[LoraLinear]:
    """The adapted layers of a model that can be run merged: plain linear ones, on a CPU, in bfloat16.

    On a GPU the engine takes the adapter by itself, and a second copy of a large model's weights would be too much.
    """
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, LoraLinear)
        and type(layer.base_layer) is nn.Linear
        and layer.base_layer.weight.device.type == "cpu"
        and layer.base_layer.weight.dtype == torch.bfloat16
    ]


def _adapter(layer: LoraLinear) -> tuple[Tensor, Tensor]:
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def _cut(values: Tensor, noise: Tensor) -> None:
    """Round float32 values [N] to what bfloat16 can hold, up or down by the noise (integers below 2**16)."""
    bits = values.view(torch.int32)
    for start in range(0, len(bits), len(noise)):
        piece = bits[start : start + len(noise)]
        piece += noise[: len(piece)]
        piece &= -(2**_LOW)


def _forward(layer: LoraLinear, weight: Tensor, x: Tensor) -> Tensor:
    if layer.disable_adapters:
        result: Tensor = layer.base_layer(x)
        return result
    output: Tensor = _MergedLinear.apply(  # type: ignore[no-untyped-call]
        x, weight, layer.base_layer.bias, *_adapter(layer), layer.scaling["default"]
    )
    return output


class _MergedLinear(torch.autograd.Function):
    """x [..., in] times a weight [out, in] that has scale * B A in it; gradients go to x, A [r, in] and B [out, r]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        x, weight, a, b = ctx.saved_tensors
        [gradient] = gradients
        rows, inputs = gradient.flatten(0, -2), x.flatten(0, -2)
        for_x = gradient @ weight if ctx.needs_input_grad[0] else None
        # Scaled where they are thin.
        for_a = ((rows @ b) * ctx.scale).T @ inputs
        for_b = rows.T @ ((inputs @ a.T) * ctx.scale)
        return for_x, None, None, for_a, for_b, None
