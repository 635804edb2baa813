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


def attend(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scale: float, window: int | None) -> Tensor:
    """Attention of `query` [heads, S, d] over `key`, `value` [kv heads, S, d]; returns [S, heads, d].

    A position sees those that the tiles of `packed` say, and with a `window` only those less than that many behind it.
    """
    if window is not None and window > int(packed.positions.max()):
        window = None
    if query.device.type == "cpu":
        mixed: Tensor = _Attention.apply(query, key, value, packed, scale, window)  # type: ignore[no-untyped-call]
        return mixed
    return _fused(query, key, value, packed, scale, window)


def _fused(query: Tensor, key: Tensor, value: Tensor, packed: Packed, scale: float, window: int | None) -> Tensor:
    """By PyTorch's kernels, in which what a tile sees stands in front of each of its blocks."""
    heads, _, width = query.shape
    mixed: list[Tensor] = []
    order: list[Tensor] = []
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
        at = torch.arange(tile.rows.start, tile.rows.stop) if isinstance(tile.rows, slice) else tile.rows
        order.append(at.to(query.device) if tile.real is None else at[tile.real])
    return torch.cat(mixed)[torch.cat(order).argsort()]


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
        ctx.save_for_backward(query, key, value)
        ctx.how = packed, scale, window
        queries, key, value = _by_position(query, len(key)), key.contiguous(), value.contiguous()
        exact = key.to(torch.promote_types(key.dtype, torch.float32))
        mixed = torch.empty_like(queries)
        for tile in packed.tiles:
            seen, own = _keys(value, tile)
            weights = _weights(_rows(queries, tile), exact, packed, tile, scale, window).to(value.dtype)
            front, block = _apart(weights, tile)
            found = torch.bmm(block, own).view(len(value), -1, value.shape[-1])
            if seen is not None:
                found += torch.bmm(front, seen)
            _put(mixed, found, tile)
        return mixed.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors  # type: ignore[attr-defined]
        packed, scale, window = ctx.how  # type: ignore[attr-defined]
        dtype, shape = query.dtype, (len(key), -1, key.shape[-1])
        queries, key, value = _by_position(query, len(key)), key.contiguous(), value.contiguous()
        gradients = gradient.view(queries.shape)
        exact = key.to(torch.promote_types(dtype, torch.float32))
        for_query = torch.empty_like(queries)
        # Many rows add to the gradient of one key.
        for_key, for_value = torch.zeros_like(exact), torch.zeros_like(exact)
        for tile in packed.tiles:
            rows, arriving = _rows(queries, tile), _rows(gradients, tile)
            weights = _weights(rows, exact, packed, tile, scale, window)
            if tile.real is not None:
                fills = ~tile.real.repeat_interleave(rows.shape[1] // len(tile.real))
                arriving.masked_fill_(fills[:, None], 0.0)
            for_scores = _softmax_backward(_products(arriving, value, tile, weights.dtype), weights)
            front, block = _apart(weights.to(dtype), tile)
            front_scores, block_scores = _apart(for_scores.to(dtype), tile)
            seen, own = _keys(key, tile)
            by_block = (len(own), -1, key.shape[-1])
            found = torch.bmm(block_scores, own).view(shape)
            _add_own(for_key, torch.bmm(block_scores.mT, rows.view(by_block)).view(shape), tile)
            _add_own(for_value, torch.bmm(block.mT, arriving.view(by_block)).view(shape), tile)
            if seen is not None:
                found += torch.bmm(front_scores, seen)
                _add_seen(for_key, torch.bmm(front_scores.mT, rows), tile)
                _add_seen(for_value, torch.bmm(front.mT, arriving), tile)
            _put(for_query, found, tile)
        # Scaled here rather than in every tile.
        for_query, for_key = for_query.mul_(scale).flatten(1, 2).transpose(0, 1), for_key.mul_(scale)
        return for_query, for_key.to(dtype), for_value.to(dtype), None, None, None


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


def _keys(x: Tensor, tile: Tile) -> tuple[Tensor | None, Tensor]:
    """Of [kv heads, S, d] what the tile sees before its blocks, and its blocks: [kv heads x count, length, d]."""
    pieces = [x[:, piece] for piece in tile.seen]
    seen = None if not pieces else pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    return seen, x[:, tile.rows].reshape(-1, tile.length, x.shape[-1])


def _products(rows: Tensor, keys: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
    """Each of `rows` with each of `keys` that its tile has: [kv heads, rows, before + length]."""
    seen, own = _keys(keys, tile)
    block = torch.bmm(rows.view(len(own), -1, rows.shape[-1]), own.mT)
    if seen is None:
        return block.view(*rows.shape[:2], tile.length).to(dtype)
    products = rows.new_empty(*rows.shape[:2], tile.before + tile.length, dtype=dtype)
    products[..., : tile.before] = torch.bmm(rows, seen.mT)
    products[..., tile.before :] = block.view(*rows.shape[:2], tile.length)
    return products


def _weights(rows: Tensor, keys: Tensor, packed: Packed, tile: Tile, scale: float, window: int | None) -> Tensor:
    """Softmax of the scores: [kv heads, rows, before + length]."""
    scores = _products(rows.to(keys.dtype) * scale, keys, tile, keys.dtype)
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


def _add_seen(x: Tensor, found: Tensor, tile: Tile) -> None:
    """Add [kv heads, before, d] to what the tile sees of [kv heads, S, d]."""
    sizes = [piece.stop - piece.start for piece in tile.seen]
    for piece, part in zip(tile.seen, torch.split(found, sizes, dim=1), strict=True):
        x[:, piece] += part


def _add_own(x: Tensor, found: Tensor, tile: Tile) -> None:
    """Add [kv heads, count x length, d] to the tile's blocks of [kv heads, S, d]."""
    if isinstance(tile.rows, slice):
        x[:, tile.rows] += found
    else:
        # A block's last position stands for all that it is filled up with, which has no gradient.
        x.index_add_(1, tile.rows, found.to(x.dtype))
