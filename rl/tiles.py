"""Which positions of packed groups see which, as tiles that attention is computed by.

A group is packed as its prompt and, behind it, its completions. Each position sees those of its prompt and of its own
completion up to itself. A square mask over all of that mostly says what is not seen; the tiles leave it out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

ROWS = 64
"""Positions of a run that are one block; what a block's own triangle wastes grows with it."""

WHOLE = 128
"""Completions up to this length are one block each."""

PAIRS = 2**16
"""Pairs of positions in a tile, so that what is computed of them for all heads stays in a processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """`count` blocks of `length` positions that see the same positions before them: those of the slices `seen`.

    Besides these each position sees those of its own block up to itself. `rows` are the positions of the blocks one
    after the other [count x length], a slice where they lie so. Shorter blocks are filled up with their last position;
    `real` [count x length] is then false there.
    """

    seen: tuple[slice, ...]
    rows: slice | Tensor
    real: Tensor | None
    count: int
    length: int

    @property
    def before(self) -> int:
        """How many positions the slices `seen` hold."""
        return sum(piece.stop - piece.start for piece in self.seen)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A sequence of packed groups: the `positions` [S] that its tokens have in their own texts, and its tiles."""

    positions: Tensor
    tiles: tuple[Tile, ...]


def tiles(groups: Sequence[tuple[int, Sequence[int]]], device: str | torch.device) -> tuple[Tile, ...]:
    """Tiles of these groups, packed one after the other: each the positions of a prompt, and of its completions.

    Every position is a row of exactly one tile.
    """
    found: list[Tile] = []
    start = 0
    for prompt, completions in groups:
        found += _of_group(start, prompt, completions, device)
        start += prompt + sum(completions)
    return tuple(found)


def _of_group(start: int, length: int, completions: Sequence[int], device: str | torch.device) -> Iterator[Tile]:
    end = start + length
    if len(completions) == 1:
        yield from _run((), start, end + completions[0])
        return
    yield from _run((), start, end)
    prompt = slice(start, end)
    blocks: list[range] = []
    for completion in completions:
        block = range(end, end + completion)
        end = block.stop
        if completion > WHOLE:
            yield from _run((prompt,), block.start, block.stop)
        elif completion:
            blocks.append(block)
    for alike in _alike(blocks, length):
        yield _tile(prompt, alike, device)


def _run(seen: tuple[slice, ...], start: int, end: int) -> Iterator[Tile]:
    """Positions that each see `seen` and all of the run before themselves."""
    for at in range(start, end, ROWS):
        stop = min(at + ROWS, end)
        before = (*seen, slice(start, at)) if at > start else seen
        yield Tile(before, slice(at, stop), None, 1, stop - at)


def _alike(blocks: Sequence[range], prompt: int) -> Iterator[list[range]]:
    """Blocks of about the same length together, as many as a tile may have."""
    together: list[range] = []
    # In their order where all are as long, so that they lie one after the other.
    for block in sorted(blocks, key=len, reverse=True):
        if together:
            length = len(together[0])
            if 2 * len(block) < length or (len(together) + 1) * length * (prompt + length) > PAIRS:
                yield together
                together = []
        together.append(block)
    if together:
        yield together


def _tile(prompt: slice, blocks: Sequence[range], device: str | torch.device) -> Tile:
    length = len(blocks[0])
    even = all(len(block) == length for block in blocks)
    if even and all(one.stop == other.start for one, other in pairwise(blocks)):
        return Tile((prompt,), slice(blocks[0].start, blocks[-1].stop), None, len(blocks), length)
    rows = torch.tensor([[min(block.start + place, block.stop - 1) for place in range(length)] for block in blocks])
    real = torch.tensor([[place < len(block) for place in range(length)] for block in blocks])
    return Tile((prompt,), rows.flatten().to(device), real.flatten().to(device), len(blocks), length)
