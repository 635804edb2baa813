"""Attention over packed groups against the plainest way to say what sees what: one square mask."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rl import packed as ways
from rl.packed import attend
from rl.tiles import Packed, pack

HEADS, SHARED, WIDTH = 6, 2, 16

# Even and ragged completions, some without any input position, prompts and completions of one tile and of several.
SHAPES = [
    [(5, [3, 3])],
    [(50, [31] * 8), (20, [31, 9, 8, 2])],
    [(130, [7, 0, 200, 5, 64, 129, 1])],
    [(70, [90]), (1, [1, 1]), (3, [0])],
]


def squared(groups: Sequence[tuple[int, Sequence[int]]], window: int | None) -> tuple[Tensor, Tensor]:
    """Positions [S], and what sees what [S, S]."""
    positions: list[int] = []
    owners: list[tuple[int, int]] = []
    for number, (prompt, completions) in enumerate(groups):
        for place, start, length in [(0, 0, prompt), *((n, prompt, c) for n, c in enumerate(completions, start=1))]:
            positions += range(start, start + length)
            owners += [(number, place)] * length
    groups_of, texts_of = torch.tensor(owners).T
    at = torch.tensor(positions)
    same = groups_of[:, None] == groups_of
    seen = same & ((texts_of[:, None] == texts_of) | (texts_of == 0)) & torch.ones(len(at), len(at)).tril().bool()
    return at, seen & (at[:, None] - at < window) if window else seen


def values_and_gradients(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], length: int, dtype: torch.dtype
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(heads, length, WIDTH, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        for heads in (HEADS, SHARED, SHARED)
    ]
    output = attention(*inputs)
    arriving = torch.randn(length, HEADS, WIDTH, dtype=torch.float64, generator=generator)
    return [output.detach(), *torch.autograd.grad(output, inputs, arriving.to(dtype))]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("way", ["tiles", "some computed again", "fused"])
def test_values_and_gradients_are_those_of_a_square_mask(
    dtype: torch.dtype, tolerance: float, window: int | None, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = ways._fused if way == "fused" else attend
    if way == "some computed again":
        monkeypatch.setattr(ways, "KEPT", 100)
    for groups in SHAPES:
        positions, seen = squared(groups, window)
        packed = pack(positions, groups, "cpu")

        def plain(query: Tensor, key: Tensor, value: Tensor, seen: Tensor = seen) -> Tensor:
            return scaled_dot_product_attention(
                query[None], key[None], value[None], seen[None, None], scale=0.3, enable_gqa=True
            )[0].transpose(0, 1)

        def tiled(query: Tensor, key: Tensor, value: Tensor, packed: Packed = packed) -> Tensor:
            return attention(query, key, value, packed, 0.3, window)

        expected = values_and_gradients(plain, len(positions), torch.float64)
        for found, right in zip(values_and_gradients(tiled, len(positions), dtype), expected, strict=True):
            assert torch.linalg.vector_norm(found.double() - right) <= tolerance * torch.linalg.vector_norm(right)
