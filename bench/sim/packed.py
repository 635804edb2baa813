"""From groups of token ids, several nodes' of them, to the tensors of one pass over stacked policies.

Each node's tokens lie one after another without padding, a part of a group (its prompt and up to four completions of
it) as one stretch; only the ends of the shorter nodes are padded. Attention alone needs parts side by side, so they are
moved into blocks of about equal length and back. Both moves, and that to the positions with outputs, pair tokens one to
one, apart from padding; so the gradient of a move is a move.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl.batches import Group

ROWS_PER_PART = 4
"""Completions that share one pass over their prompt: more repeat it less often and attend to more that is masked."""

FULL = 0.7
"""Least length of a part against the longest in its block: attention is cheap, more blocks are more calls."""

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of a matrix [rows, ...] to other places: `there` says where each comes from, `back` where its gradient does.

    Padding on one side is paired with padding on the other, the gradient of which is zero.
    """

    there: Tensor
    back: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """The moved rows, with gradient."""
        moved: Tensor = _Moved.apply(rows, self.there, self.back)  # type: ignore[no-untyped-call]
        return moved


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradients[0].index_select(0, back), None, None


@dataclass(frozen=True, slots=True)
class Packed:
    """N nodes' groups: M positions a node, U of them with outputs, T completion tokens over all nodes.

    `ids`, `positions`: [N, M]. `to_blocks` moves the N * M positions into the blocks' slots one block after another,
    `from_blocks` back. `shapes` are the blocks' parts and slots a part, `masks` their additive masks [parts, 1, S, S].
    `to_outputs` moves N * M positions to N * U. `outputs`: [T], the place among N * U that predicts each of `targets`;
    `node`: [T]. `lengths`: completion tokens of each row.
    """

    ids: Tensor
    positions: Tensor
    to_blocks: Move
    from_blocks: Move
    shapes: list[tuple[int, int]]
    masks: list[Tensor]
    to_outputs: Move
    outputs: Tensor
    targets: Tensor
    node: Tensor
    lengths: list[int]


class _Tokens:
    """All nodes' positions in order, without any padding; a part's prompt is block 0, its completions are 1, 2, ..."""

    def __init__(self, nodes: Sequence[Sequence[Group]]) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.blocks: list[int] = []
        self.parts: list[int] = []
        self.sources: list[int] = []
        self.targets: list[int] = []
        self.lengths: list[int] = []
        self.counts: list[int] = []
        self.trained: list[int] = []
        for groups in nodes:
            positions, trained = len(self.ids), len(self.targets)
            for group in groups:
                pieces = -(-len(group.rows) // ROWS_PER_PART)
                for piece in range(pieces):
                    rows = slice(piece * len(group.rows) // pieces, (piece + 1) * len(group.rows) // pieces)
                    self._add_part(group.prompt, [row.tokens for row in group.rows[rows]])
            self.counts.append(len(self.ids) - positions)
            self.trained.append(len(self.targets) - trained)

    def _add_part(self, prompt: tuple[int, ...], rows: Sequence[tuple[int, ...]]) -> None:
        begin, end = len(self.ids), len(prompt)
        self.ids += prompt
        self.positions += range(end)
        self.blocks += [0] * end
        last = begin + end - 1
        for number, tokens in enumerate(rows, start=1):
            inputs = len(tokens) - 1
            start = len(self.ids)
            self.sources.append(last)
            self.sources += range(start, start + inputs)
            self.ids += tokens[:-1]
            self.positions += range(end, end + inputs)
            self.blocks += [number] * inputs
            self.targets += tokens
            self.lengths.append(inputs + 1)
        self.parts.append(len(self.ids) - begin)


def pack(nodes: Sequence[Sequence[Group]]) -> Packed:
    """The tensors of one pass. At least one node has a group."""
    tokens = _Tokens(nodes)
    counts = np.array(tokens.counts)
    # At least one place of padding to each node, for padding elsewhere to be paired with.
    width = int(counts.max()) + 1
    node_of = np.repeat(np.arange(len(nodes)), counts)
    flat = _spread(counts, width)
    ids, positions = np.zeros((2, len(nodes) * width), dtype=np.int64)
    ids[flat], positions[flat] = tokens.ids, tokens.positions

    sources = np.array(tokens.sources)
    has_output = np.zeros(len(flat), dtype=bool)
    has_output[sources] = True
    outputs_of = np.bincount(node_of[has_output], minlength=len(nodes))
    outputs_width = int(outputs_of.max()) + 1
    place = np.zeros(len(flat), dtype=np.int64)
    place[has_output] = _spread(outputs_of, outputs_width)

    slot_of, shapes, masks = _blocks(np.array(tokens.parts), np.array(tokens.blocks))
    slots = sum(parts * size for parts, size in shapes)
    to_blocks = _move(flat, slot_of, len(nodes) * width, slots, width - 1, slots - 1)
    return Packed(
        ids=torch.from_numpy(ids).view(len(nodes), width),
        positions=torch.from_numpy(positions).view(len(nodes), width),
        to_blocks=to_blocks,
        from_blocks=Move(to_blocks.back, to_blocks.there),
        shapes=shapes,
        masks=masks,
        to_outputs=_move(
            flat[has_output],
            place[has_output],
            len(nodes) * width,
            len(nodes) * outputs_width,
            width - 1,
            outputs_width - 1,
        ),
        outputs=torch.from_numpy(place[sources]),
        targets=torch.tensor(tokens.targets),
        node=torch.from_numpy(np.repeat(np.arange(len(nodes)), tokens.trained)),
        lengths=tokens.lengths,
    )


def _blocks(lengths: Indices, blocks: Indices) -> tuple[Indices, list[tuple[int, int]], list[Tensor]]:
    """The slot of each position, each block's parts and slots a part, and its mask [parts, 1, S, S].

    The last part of the last block is padding only, so the last slot always is.
    """
    order = np.argsort(-lengths, kind="stable")
    starts = np.cumsum(lengths) - lengths
    slot_of = np.zeros(len(blocks), dtype=np.int64)
    shapes: list[tuple[int, int]] = []
    masks: list[Tensor] = []
    done = used = 0
    while done < len(order):
        size = int(lengths[order[done]])
        count = int((lengths[order[done:]] >= FULL * size).sum())
        parts = order[done : done + count]
        done += count
        spare = int(done == len(order))
        real = np.arange(size) < lengths[parts][:, None]
        position = (starts[parts][:, None] + np.arange(size))[real]
        slot_of[position] = used + np.flatnonzero(real)
        inside = np.full((count + spare, size), -1)
        inside[:count][real] = blocks[position]
        shapes.append((count + spare, size))
        masks.append(_mask(torch.from_numpy(inside)))
        used += (count + spare) * size
    return slot_of, shapes, masks


def _mask(blocks: Tensor) -> Tensor:
    """Additive mask [parts, 1, S, S] for block numbers [parts, S]; -1 is padding, which sees itself at least."""
    causal = torch.ones(blocks.shape[1], blocks.shape[1], dtype=torch.bool).tril()
    query, key = blocks[:, :, None], blocks[:, None, :]
    seen = causal & ((query == key) | (key == 0))
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))[:, None]


def _spread(counts: Indices, width: int) -> Indices:
    """Places of count[n] things of each n where every n has `width` places."""
    starts = np.cumsum(counts) - counts
    places: Indices = np.arange(counts.sum()) + np.repeat(np.arange(len(counts)) * width - starts, counts)
    return places


def _move(source: Indices, target: Indices, sources: int, targets: int, spare: int, spare_target: int) -> Move:
    """`source[i]` of `sources` goes to `target[i]` of `targets`; all others are padding, as the spare places are."""
    there = np.full(targets, spare)
    there[target] = source
    back = np.full(sources, spare_target)
    back[source] = target
    return Move(torch.from_numpy(there), torch.from_numpy(back))
