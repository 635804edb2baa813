"""From groups of token ids to micro-batches of bounded size.

A part of a group is its prompt and some of its completions. Packed, all parts of a micro-batch are one sequence without
padding: of each part the prompt once and the completions after it, each seeing the prompt and itself (`rl.tiles`), with
positions that go on from the prompt's end. For a model that cannot be told what sees what, a part is a prompt and one
completion, an ordinary causal sequence that is padded on the right. A completion's last token predicts nothing that is
trained, so it is a target and never an input.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.tiles import Packed, pack

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
    """One forward pass over B sequences of S positions, with N completion tokens in all of them.

    `ids` and `positions`: [B, S]. `packed` says what sees what where B = 1 sequence holds several texts; without it all
    are plain causal ones. `sources`: [N], the flat position (b * S + s) whose output predicts each of `targets`: [N].
    `rows` in their order.
    """

    ids: Tensor
    positions: Tensor
    packed: Packed | None
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
    part, for models that cannot be told what sees what.
    """
    parts = [part for group in groups for part in _split(group, budget, packing)]
    # Where they are padded, like lengths together waste little; and the longest show first whether memory is enough.
    parts.sort(key=lambda part: part.length, reverse=True)
    batches: list[list[Group]] = []
    for part in parts:
        if batches and size([*batches[-1], part], packing=packing) <= budget:
            batches[-1].append(part)
        else:
            batches.append([part])
    return batches


def share_out(groups: Sequence[Group], budget: int, ranks: int, *, packing: bool = True) -> list[list[list[Group]]]:
    """The micro-batches of each rank, planned so that all have about equally much to do; some may have none.

    With few or uneven micro-batches they are made smaller than `budget`. The same in every rank that asks.
    """
    if ranks == 1:
        return [plan(groups, budget, packing=packing)]
    whole = _total(plan(groups, budget, packing=packing), packing)
    # Smaller ones repeat prompts more often, so the first that is even enough is taken.
    smaller = (-(-whole // (ranks * each)) for each in range(1, MOST_EACH + 1))
    plans: list[list[list[list[Group]]]] = []
    for limit in [budget, *(limit for limit in smaller if limit < budget)]:
        plans.append(_deal(plan(groups, limit, packing=packing), ranks, packing))
        if _longest(plans[-1], packing) * ranks <= EVEN * whole:
            return plans[-1]
    return min(plans, key=lambda shares: _longest(shares, packing))


def _deal(batches: Sequence[list[Group]], ranks: int, packing: bool) -> list[list[list[Group]]]:
    """Each micro-batch, the largest first, goes to the rank that has least."""
    shares: list[list[list[Group]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for batch in sorted(batches, key=lambda parts: size(parts, packing=packing), reverse=True):
        least = loads.index(min(loads))
        shares[least].append(batch)
        loads[least] += size(batch, packing=packing)
    return shares


def _longest(shares: Sequence[Sequence[Sequence[Group]]], packing: bool) -> int:
    return max(_total(share, packing) for share in shares)


def _total(batches: Sequence[Sequence[Group]], packing: bool) -> int:
    return sum(size(batch, packing=packing) for batch in batches)


def size(parts: Sequence[Group], *, packing: bool = True) -> int:
    """Positions of a micro-batch of these parts, padding included."""
    if packing:
        return sum(part.length for part in parts)
    return len(parts) * max(part.length for part in parts)


def _split(group: Group, budget: int, packing: bool) -> list[Group]:
    parts: list[Group] = []
    rows: list[Row] = []
    length = len(group.prompt)
    for row in group.rows:
        added = len(row.tokens) - 1
        if rows and (not packing or length + added > budget):
            parts.append(Group(group.prompt, tuple(rows)))
            rows, length = [], len(group.prompt)
        rows.append(row)
        length += added
    parts.append(Group(group.prompt, tuple(rows)))
    return parts


def collate(parts: Sequence[Group], device: str | torch.device, *, packing: bool = True) -> MicroBatch:
    """The tensors of one micro-batch. Without `packing` each part must have one completion."""
    width = sum(part.length for part in parts) if packing else max(part.length for part in parts)
    ids: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    for part in parts:
        prompt, start = len(part.prompt), len(ids)
        ids += part.prompt
        positions += range(prompt)
        for row in part.rows:
            sources += [start + prompt - 1, *range(len(ids), len(ids) + len(row.tokens) - 1)]
            targets += row.tokens
            ids += row.tokens[:-1]
            positions += range(prompt, prompt + len(row.tokens) - 1)
        if not packing:
            # Positions go on: transformers takes a fall for the start of a sequence.
            positions += range(part.length, width)
            ids += [0] * (width - part.length)
    placed = torch.tensor(positions)
    shapes = [(len(part.prompt), [len(row.tokens) - 1 for row in part.rows]) for part in parts]
    return MicroBatch(
        ids=torch.tensor(ids).view(-1, width).to(device),
        positions=placed.view(-1, width).to(device),
        packed=pack(placed, shapes, device) if packing else None,
        sources=torch.tensor(sources).to(device),
        targets=torch.tensor(targets).to(device),
        rows=tuple(row for part in parts for row in part.rows),
    )
