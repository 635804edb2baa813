"""From groups of token ids to micro-batches of bounded size.

A part of a group (its prompt and some of its completions) is one sequence: the prompt once, the completions after it,
each seeing the prompt and itself under a block mask, with positions that go on from the prompt's end. With one
completion to a part that is an ordinary causal sequence and needs no mask. Padding is on the right. A completion's last
token predicts nothing that is trained, so it is a target and never an input.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAIRS_PER_TOKEN = 1000
"""Attention pairs that cost as much time as one token in all other layers, measured with SmolLM2-135M on a CPU in
bfloat16 (prompts of 50 to 800 tokens, completions of 32 and 256). A larger model's share of attention is smaller."""

EVEN = 1.1
"""How much more than its part of all positions a rank may get."""

MOST_EACH = 4
"""Micro-batches a rank gets in the finest plan that is tried for the sake of evenness."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A completion to train on: its token ids (at least one; EOS included if it finished) and its advantage.

    `sampled` are the engine's log-probs for those tokens where it reported them. `external` rows are text of others.
    `stale` rows were sampled by this policy before its last step, and have `sampled`.
    Rows are compared by identity.
    """

    tokens: tuple[int, ...]
    advantage: float
    sampled: tuple[float, ...] | None = None
    external: bool = False
    stale: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A prompt (at least one token) and completions of it; also a part of such a group."""

    prompt: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def length(self) -> int:
        """Input positions of the group as one sequence."""
        return len(self.prompt) + sum(len(row.tokens) - 1 for row in self.rows)

    @property
    def trained(self) -> int:
        """Completion tokens."""
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass of B parts padded to S positions, with N completion tokens over all of them.

    `ids` and `positions`: [B, S]. `mask`: [B, 1, S, S], additive, or None where plain causal attention is right.
    `sources`: [N], the flat position (b * S + s) whose output predicts each of `targets`: [N]. `rows` in their order.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor | None
    sources: Tensor
    targets: Tensor
    rows: tuple[Row, ...]

    @property
    def lengths(self) -> list[int]:
        """Completion tokens of each row; their sum is N."""
        return [len(row.tokens) for row in self.rows]


def plan(groups: Iterable[Group], budget: int, *, packing: bool = True) -> list[list[Group]]:
    """Split groups into parts and gather them into micro-batches of at most `budget` positions, padding included.

    A single completion longer than `budget` gets a micro-batch of its own. `packing` False gives one completion to a
    part, for models whose attention takes no mask.
    """
    parts = [part for group in groups for part in _split(group, budget, packing)]
    # Single completions go without a mask, so they are kept apart; like lengths together waste little on padding.
    parts.sort(key=lambda part: (len(part.rows) > 1, part.length), reverse=True)
    batches: list[list[Group]] = []
    for part in parts:
        current = batches[-1] if batches else None
        if (
            current is None
            or (len(current[0].rows) > 1) != (len(part.rows) > 1)
            or (len(current) + 1) * current[0].length > budget
        ):
            batches.append([part])
        else:
            current.append(part)
    return batches


def share_out(groups: Sequence[Group], budget: int, ranks: int, *, packing: bool = True) -> list[list[list[Group]]]:
    """The micro-batches of each rank, planned so that all have about equally much to do; some may have none.

    With few or uneven micro-batches they are made smaller than `budget`. The same in every rank that asks.
    """
    if ranks == 1:
        return [plan(groups, budget, packing=packing)]
    whole = sum(map(padded_size, plan(groups, budget, packing=packing)))
    # Smaller ones repeat prompts more often, so the first that is even enough is taken.
    smaller = (-(-whole // (ranks * each)) for each in range(1, MOST_EACH + 1))
    plans: list[list[list[list[Group]]]] = []
    for limit in [budget, *(size for size in smaller if size < budget)]:
        plans.append(_deal(plan(groups, limit, packing=packing), ranks))
        if _longest(plans[-1]) * ranks <= EVEN * whole:
            return plans[-1]
    return min(plans, key=_longest)


def _deal(batches: Sequence[list[Group]], ranks: int) -> list[list[list[Group]]]:
    """Each micro-batch, the largest first, goes to the rank that has least."""
    shares: list[list[list[Group]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for batch in sorted(batches, key=padded_size, reverse=True):
        least = loads.index(min(loads))
        shares[least].append(batch)
        loads[least] += padded_size(batch)
    return shares


def _longest(shares: Sequence[Sequence[Sequence[Group]]]) -> int:
    return max(sum(map(padded_size, share)) for share in shares)


def padded_size(parts: Sequence[Group]) -> int:
    """Positions of a micro-batch of these parts, padding included."""
    return len(parts) * max(part.length for part in parts)


def _split(group: Group, budget: int, packing: bool) -> list[Group]:
    per_part = _rows_per_part(group) if packing else 1
    parts: list[Group] = []
    rows: list[Row] = []
    length = len(group.prompt)
    for row in group.rows:
        added = len(row.tokens) - 1
        if rows and (len(rows) == per_part or length + added > budget):
            parts.append(Group(group.prompt, tuple(rows)))
            rows, length = [], len(group.prompt)
        rows.append(row)
        length += added
    parts.append(Group(group.prompt, tuple(rows)))
    return parts


def _rows_per_part(group: Group) -> int:
    """How many completions share a prompt's pass: more repeat the prompt less often and compute more useless pairs."""
    count, prompt = len(group.rows), len(group.prompt)
    completion = (group.length - prompt) / count

    def cost(rows: int) -> float:
        length = prompt + rows * completion
        return -(-count // rows) * (length + length * length / PAIRS_PER_TOKEN)

    return min(range(1, count + 1), key=cost)


def collate(parts: Sequence[Group], device: str | torch.device, dtype: torch.dtype) -> MicroBatch:
    """The tensors of one micro-batch. `dtype` is the model's, for the mask."""
    width = max(part.length for part in parts)
    packed = any(len(part.rows) > 1 for part in parts)
    ids = torch.zeros(len(parts), width, dtype=torch.long)
    # Without a mask positions must go on through the padding: transformers takes a fall for the start of a sequence.
    positions = torch.arange(width).repeat(len(parts), 1)
    blocks = torch.full((len(parts), width), -1, dtype=torch.long)
    sources: list[int] = []
    targets: list[int] = []
    for b, part in enumerate(parts):
        start = len(part.prompt)
        ids[b, :start] = torch.tensor(part.prompt)
        blocks[b, :start] = 0
        for number, row in enumerate(part.rows, start=1):
            end = start + len(row.tokens) - 1
            ids[b, start:end] = torch.tensor(row.tokens[:-1], dtype=torch.long)
            positions[b, start:end] = torch.arange(len(part.prompt), len(part.prompt) + end - start)
            blocks[b, start:end] = number
            sources += [b * width + len(part.prompt) - 1, *range(b * width + start, b * width + end)]
            targets += row.tokens
            start = end
    return MicroBatch(
        ids=ids.to(device),
        positions=positions.to(device),
        mask=_block_mask(blocks.to(device), dtype) if packed else None,
        sources=torch.tensor(sources).to(device),
        targets=torch.tensor(targets).to(device),
        rows=tuple(row for part in parts for row in part.rows),
    )


def _block_mask(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, S, S] for block numbers [B, S]: 0 the prompt, 1.. the completions, -1 padding."""
    width = blocks.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=blocks.device).tril()
    query, key = blocks[:, :, None], blocks[:, None, :]
    seen = causal & ((query == key) | (key == 0))
    mask = torch.zeros(seen.shape, dtype=dtype, device=blocks.device)
    return mask.masked_fill(~seen, torch.finfo(dtype).min)[:, None]
