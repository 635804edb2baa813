"""Attention over packed groups, tile by tile (`rl.tiles`), forwards and backwards.

On a CPU a tile is a few batched matrix products over all heads, with the softmax between them: PyTorch's own kernel
takes longer there, most of all backwards, and would be given a mask of mostly nothing. Elsewhere each tile is a call of
PyTorch's fused attention. Scores are computed in float32 at least, as in PyTorch's kernels.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from rl.tiles import Packed, Tile

KEPT = 1024
"""Softmax weights of rows that see up to so many positions are kept for the backward pass: for each position not much
more than a layer keeps of it anyway. Those of longer rows are computed again."""


def attend(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scale: float, window: int | None) -> Tensor:
    """Attention of `query` [heads, S, d] over `key` [kv heads, S, d], `value` [kv heads, S, v]; returns [S, heads, v].

    A position sees those that the tiles of `packed` say, and with a `window` only those less than that many behind it.
    """
    if window is not None and window > packed.last:
        window = None
    if query.device.type == "cpu":
        mixed: Tensor = _Attention.apply(query, key, value, packed, scale, window)  # type: ignore[no-untyped-call]
        return mixed
    return _fused(query, key, value, packed, scale, window)


def _fused(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scale: float, window: int | None) -> Tensor:
    """By PyTorch's kernels, in which what a tile sees stands in front of each of its blocks."""
    heads, width = len(query), value.shape[2]
    mixed: list[Tensor] = []
    for tile in packed.tiles:
        queries = _blocks(query, tile)
        keys, values = (
            torch.cat([*(x[:, piece].expand(tile.count, -1, -1, -1) for piece in tile.seen), _blocks(x, tile)], dim=2)
            for x in (key, value)
        )
        mask: Any = causal_lower_right(tile.length, tile.before + tile.length)
        if window is not None or not tile.seen:
            mask = ~_unseen(packed, tile, window)[:, None]
        found = scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=True)
        rows = found.transpose(1, 2).reshape(-1, heads, width)
        mixed.append(rows if tile.real is None else rows[tile.real])
    return torch.cat(mixed)[packed.places]


def _blocks(x: Tensor, tile: Tile) -> Tensor:
    """The tile's rows of [heads, S, d], as [count, heads, length, d]."""
    return x[:, tile.rows].reshape(len(x), tile.count, tile.length, -1).transpose(0, 1)


def _unseen(packed: Packed, tile: Tile, window: int | None) -> Tensor:
    """What a tile's rows do not see of what stands in front of their block, and of it: [count, length, keys]."""
    front = tile.unseen.new_zeros(tile.count, tile.length, tile.before)
    unseen = torch.cat([front, tile.unseen.expand(tile.count, -1, -1)], dim=2)
    if window is not None:
        own = packed.positions[tile.rows].view(tile.count, tile.length)
        front_at = torch.cat([packed.positions[piece] for piece in (*tile.seen, slice(0, 0))])
        at = torch.cat([front_at.expand(tile.count, -1), own], dim=1)
        unseen |= own[:, :, None] - at[:, None, :] >= window
    return unseen


class _Attention(torch.autograd.Function):
    """Of a query head the rows are put together with those of the heads that share its key head."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, packed: Packed, scale: float, window: int | None
    ) -> Tensor:
        ctx.how = packed, scale, window
        saved = [query, key, value]
        queries, key, value = _by_position(query, len(key)), key.contiguous(), value.contiguous()
        exact = key.to(torch.promote_types(key.dtype, torch.float32))
        mixed = queries.new_empty(*queries.shape[:3], value.shape[2])
        for tile in packed.tiles:
            weights = _weights(_rows(queries, tile), exact, packed, tile, scale, window).to(value.dtype)
            if _kept(tile) and any(ctx.needs_input_grad):
                saved.append(weights)
            _put(mixed, _sums(weights, value, tile), tile)
        ctx.save_for_backward(*saved)
        return mixed.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors  # type: ignore[attr-defined]
        packed, scale, window = ctx.how  # type: ignore[attr-defined]
        dtype, known = query.dtype, iter(kept)
        queries, key, value = _by_position(query, len(key)), key.contiguous(), value.contiguous()
        gradients = gradient.view(*queries.shape[:3], value.shape[2])
        exact = key.to(torch.promote_types(dtype, torch.float32))
        for_query = torch.empty_like(queries)
        # Many rows add to the gradient of one key.
        for_key, for_value = torch.zeros_like(exact), torch.zeros_like(value, dtype=exact.dtype)
        for tile in packed.tiles:
            rows, arriving = _rows(queries, tile), _rows(gradients, tile)
            weights = next(known) if _kept(tile) else _weights(rows, exact, packed, tile, scale, window).to(dtype)
            if tile.real is not None:
                fills = ~tile.real.repeat_interleave(rows.shape[1] // len(tile.real))
                arriving.masked_fill_(fills[:, None], 0.0)
            for_scores = _softmax_backward(_products(arriving, value, tile), weights)
            _put(for_query, _sums(for_scores, key, tile), tile)
            _add(for_key, for_scores, rows, tile)
            _add(for_value, weights, arriving, tile)
        # Scaled here rather than in every tile.
        for_query, for_key = for_query.mul_(scale).flatten(1, 2).transpose(0, 1), for_key.mul_(scale)
        return for_query, for_key.to(dtype), for_value.to(dtype), None, None, None


def _kept(tile: Tile) -> bool:
    return tile.before + tile.length <= KEPT


def _by_position(x: Tensor, shared: int) -> Tensor:
    """[heads, S, d] to [S, shared, heads / shared, d]: the heads by the key head that they share."""
    return x.transpose(0, 1).reshape(x.shape[1], shared, -1, x.shape[2]).contiguous()


def _rows(x: Tensor, tile: Tile) -> Tensor:
    """The tile's rows of [S, kv heads, r, d], as [kv heads, count x length x r, d]."""
    return x[tile.rows].transpose(0, 1).flatten(1, 2).contiguous()


def _put(x: Tensor, found: Tensor, tile: Tile) -> None:
    """The opposite of `_rows`."""
    rows = found.view(len(found), -1, *x.shape[2:]).transpose(0, 1)
    if tile.real is None:
        x[tile.rows] = rows
    else:
        x[tile.rows[tile.real]] = rows[tile.real]  # type: ignore[index]


def _keys(x: Tensor, tile: Tile) -> tuple[Tensor | None, Tensor | None]:
    """Of [kv heads, S, d] what all blocks of the tile see, and its blocks: [kv heads x count, length, d]."""
    pieces = [x[:, piece] for piece in tile.common]
    seen = None if not pieces else pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    return seen, None if tile.single else x[:, tile.rows].reshape(-1, tile.length, x.shape[-1])


def _products(rows: Tensor, keys: Tensor, tile: Tile) -> Tensor:
    """Each of `rows` with each of `keys` that its tile has: [kv heads, rows, before + length]."""
    seen, own = _keys(keys, tile)
    if own is None:
        assert seen is not None
        return torch.bmm(rows, seen.mT)
    block = torch.bmm(rows.view(len(own), -1, rows.shape[-1]), own.mT).view(*rows.shape[:2], tile.length)
    return block if seen is None else torch.cat([torch.bmm(rows, seen.mT), block], dim=2)


def _sums(weights: Tensor, x: Tensor, tile: Tile) -> Tensor:
    """What the tile has of [kv heads, S, d], by the weights [kv heads, rows, before + length]: [kv heads, rows, d]."""
    seen, own = _keys(x, tile)
    if own is None:
        assert seen is not None
        return torch.bmm(weights, seen)
    front, block = _apart(weights, tile)
    found = torch.bmm(block, own).view(len(weights), -1, own.shape[-1])
    return found if seen is None else found.add_(torch.bmm(front, seen))


def _add(x: Tensor, weights: Tensor, rows: Tensor, tile: Tile) -> None:
    """To [kv heads, S, d], to each of what the tile has, add the `rows` [kv heads, rows, d] by their weights for it."""
    front, block = (weights, None) if tile.single else _apart(weights, tile)
    if tile.common:
        found = torch.bmm(front.mT, rows)
        sizes = [piece.stop - piece.start for piece in tile.common]
        for piece, part in zip(tile.common, torch.split(found, sizes, dim=1), strict=True):
            x[:, piece] += part
    if block is None:
        return
    found = torch.bmm(block.mT, rows.view(len(block), -1, rows.shape[-1])).view(len(x), -1, x.shape[-1])
    if isinstance(tile.rows, slice):
        x[:, tile.rows] += found
    else:
        # A block's last position stands for all that it is filled up with, which has no gradient.
        x.index_add_(1, tile.rows, found.to(x.dtype))


def _weights(rows: Tensor, keys: Tensor, packed: Packed, tile: Tile, scale: float, window: int | None) -> Tensor:
    """Softmax of the scores: [kv heads, rows, before + length]."""
    scores = _products(rows.to(keys.dtype) * scale, keys, tile)
    if window is None:
        hidden, unseen = scores[..., tile.before :], tile.unseen
    else:
        hidden, unseen = scores, _unseen(packed, tile, window)
    by_row = hidden.view(len(scores), tile.count, tile.length, -1, hidden.shape[-1])
    by_row.masked_fill_(unseen[:, :, None], -math.inf)
    return scores.softmax(-1)


def _softmax_backward(gradient: Tensor, weights: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten._softmax_backward_data(gradient, weights, -1, weights.dtype)
    return found


def _apart(x: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """[kv heads, rows, before + length] as [kv heads, rows, before] and [kv heads x count, length x r, length]."""
    own = x[..., tile.before :].reshape(len(x) * tile.count, -1, tile.length)
    return x[..., : tile.before], own
