"""Which positions of packed groups see which, as tiles that attention is computed by.

A group is packed as its prompt and, behind it, its completions. Each position sees those of its prompt and of its own
completion up to itself. A square mask over all of a long group mostly says what is not seen, which the tiles leave out;
a short one is a square.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

ROWS = 64
"""Positions of a run that are one block; what a block's own triangle wastes grows with it."""

WHOLE = 128
"""Completions up to this length are one block each, and so are whole groups."""

PAIRS = 2**16
"""Pairs of positions in a tile, so that what is computed of them for all heads stays in a processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """`count` blocks of `length` positions that see the same positions before them: those of the slices `seen`.

    Of its own block a position sees what `unseen` [count or 1, length, length] does not hide from it. `rows` are the
    positions of the blocks one after the other [count x length], a slice where they lie so. Shorter blocks are filled
    up with their last position; `real` [count x length] is then false there.
    """

    seen: tuple[slice, ...]
    unseen: Tensor
    rows: slice | Tensor
    real: Tensor | None
    count: int
    length: int

    @property
    def single(self) -> bool:
        """Whether it is one block, as it lies."""
        return self.count == 1 and isinstance(self.rows, slice)

    @property
    def common(self) -> tuple[slice, ...]:
        """What all rows may see: `seen`, and a single block itself behind it."""
        if not self.single:
            return self.seen
        assert isinstance(self.rows, slice)
        if self.seen and self.seen[-1].stop == self.rows.start:
            return (*self.seen[:-1], slice(self.seen[-1].start, self.rows.stop))
        return (*self.seen, self.rows)

    @property
    def before(self) -> int:
        """How many positions the slices `seen` hold."""
        return sum(piece.stop - piece.start for piece in self.seen)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A sequence of packed groups: the `positions` [S] that its tokens have in their own texts, the `last` of them, its
    tiles, and for each position its place [S] among the rows of all tiles, one after the other.
    """

    positions: Tensor
    last: int
    tiles: tuple[Tile, ...]
    places: Tensor


def pack(positions: Tensor, groups: Sequence[tuple[int, Sequence[int]]], device: str | torch.device) -> Packed:
    """These groups, packed one after the other: see `tiles`. `positions` [S], at least one, are on the CPU."""
    found = tiles(groups, device)
    rows = [_indices(tile) for tile in found]
    return Packed(positions.to(device), int(positions.max()), found, torch.cat(rows).argsort().to(device))


def _indices(tile: Tile) -> Tensor:
    rows = torch.arange(tile.rows.start, tile.rows.stop) if isinstance(tile.rows, slice) else tile.rows.cpu()
    return rows if tile.real is None else rows[tile.real.cpu()]


def tiles(groups: Sequence[tuple[int, Sequence[int]]], device: str | torch.device) -> tuple[Tile, ...]:
    """Tiles of these groups, packed one after the other: each the positions of a prompt, and of its completions.

    Every position is a row of exactly one tile.
    """
    found: list[Tile] = []
    short: dict[range, Tensor] = {}
    start = 0
    for prompt, completions in groups:
        end = start + prompt + sum(completions)
        if end - start <= WHOLE:
            short[range(start, end)] = _square(prompt, completions)
        else:
            found += _of_group(start, prompt, completions, device)
        start = end
    for alike in _alike(list(short), 0):
        found.append(_tile((), alike, [short[block] for block in alike], device))
    return tuple(found)


def _square(prompt: int, completions: Sequence[int]) -> Tensor:
    """What each position of a group does not see of it."""
    texts = torch.arange(1 + len(completions)).repeat_interleave(torch.tensor([prompt, *completions]))
    return _triangle(len(texts)) | ((texts[:, None] != texts) & (texts != 0))


def _triangle(length: int) -> Tensor:
    places = torch.arange(length)
    return places > places[:, None]


def _of_group(start: int, length: int, completions: Sequence[int], device: str | torch.device) -> Iterator[Tile]:
    end = start + length
    if len(completions) == 1:
        yield from _run((), start, end + completions[0], device)
        return
    yield from _run((), start, end, device)
    prompt = slice(start, end)
    blocks: list[range] = []
    for completion in completions:
        block = range(end, end + completion)
        end = block.stop
        if completion > WHOLE:
            yield from _run((prompt,), block.start, block.stop, device)
        elif completion:
            blocks.append(block)
    for alike in _alike(blocks, length):
        yield _tile((prompt,), alike, [], device)


def _run(seen: tuple[slice, ...], start: int, end: int, device: str | torch.device) -> Iterator[Tile]:
    """Positions that each see `seen` and all of the run before themselves."""
    for at in range(start, end, ROWS):
        stop = min(at + ROWS, end)
        before = (*seen, slice(start, at)) if at > start else seen
        yield Tile(before, _triangle(stop - at)[None].to(device), slice(at, stop), None, 1, stop - at)


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


def _tile(
    seen: tuple[slice, ...], blocks: Sequence[range], squares: Sequence[Tensor], device: str | torch.device
) -> Tile:
    """A tile of these blocks, the longest first. `squares` say what each does not see of itself: by itself what comes
    later."""
    length = len(blocks[0])
    if squares:
        unseen = torch.ones(len(blocks), length, length, dtype=torch.bool)
        for number, square in enumerate(squares):
            unseen[number, : len(square), : len(square)] = square
            # What fills a block up has to see anything.
            unseen[number, len(square) :] = False
    else:
        unseen = _triangle(length)[None]
    even = all(len(block) == length for block in blocks)
    if even and all(one.stop == other.start for one, other in pairwise(blocks)):
        whole = slice(blocks[0].start, blocks[-1].stop)
        return Tile(seen, unseen.to(device), whole, None, len(blocks), length)
    places = torch.arange(length)
    starts, lengths = (
        torch.tensor(values)[:, None] for values in zip(*((b.start, len(b)) for b in blocks), strict=True)
    )
    rows, real = starts + places.minimum(lengths - 1), places < lengths
    return Tile(seen, unseen.to(device), rows.flatten().to(device), real.flatten().to(device), len(blocks), length)
