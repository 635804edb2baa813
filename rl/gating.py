"""What the likelihood gate keeps out of a learning step: the bookkeeping between `rl.gate` and `rl.policy`.

Refused are completions of others with a positive advantage that are too unlikely. Where all of a group's are, what is
left of it only says what not to do, and is out too. A group may be split over micro-batches and over ranks, so rows may
have been counted before it is known that they are out (`Screen.late`): the step is then made again without them. That
takes negative rows of others, a group in several pieces and an attack, so it costs nothing to those left in peace.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from rl.batches import Group, Row
from rl.gate import Gate, likelihood
from rl.ranks import Ranks


class Screen:
    """Which rows of some groups are kept out. Without a gate none is."""

    def __init__(self, gate: Gate | None, groups: Sequence[Group]) -> None:
        self._gate = gate
        self._groups = [] if gate is None else [group for group in groups if any(map(_is_judged, group.rows))]
        self.begin()

    def begin(self) -> None:
        """Nothing has been found."""
        self.refused: set[Row] = set()
        self._left_out: set[Row] = set()

    @property
    def judges(self) -> bool:
        """Whether there is any row that could be refused."""
        return bool(self._groups)

    @property
    def out(self) -> set[Row]:
        """The refused rows, and all rows of groups whose positive ones are all refused."""
        lost = (g for g in self._groups if all(row in self.refused for row in g.rows if _is_judged(row)))
        return self.refused.union(*(group.rows for group in lost))

    @property
    def late(self) -> bool:
        """Whether rows that are out were among those that `sift` left."""
        return not self.out <= self._left_out

    def look(self, rows: Sequence[Row], logprobs: Sequence[Tensor]) -> None:
        """Judge rows by the log-probs of their tokens under the policy: nats, one tensor a row."""
        judged = [(row, values) for row, values in zip(rows, logprobs, strict=True) if _is_judged(row)]
        if self._gate is None or not judged:
            return
        # One copy from the device for all of them.
        tokens = iter(torch.cat([values for _, values in judged]).tolist())
        found = [(row, likelihood(list(islice(tokens, len(values))))) for row, values in judged]
        self.refused.update(row for row, value in found if self._gate.refuses(value))

    def sift(self, rows: Sequence[Row], logprobs: Tensor, entropy: Tensor) -> tuple[list[Row], Tensor, Tensor]:
        """Judge the rows of a micro-batch. Returns those that count, and what was given of their tokens: both [N]."""
        lengths = [len(row.tokens) for row in rows]
        self.look(rows, torch.split(logprobs.detach(), lengths))
        out = self.out.intersection(rows)
        if not out:
            return list(rows), logprobs, entropy
        self._left_out |= out
        counts = torch.tensor([row not in out for row in rows]).repeat_interleave(torch.tensor(lengths))
        counts = counts.to(logprobs.device)
        return [row for row in rows if row not in out], logprobs[counts], entropy[counts]

    def agree(self, ranks: Ranks) -> None:
        """Know what all ranks have found. Called by all, with the same groups."""
        if not self.judges:
            return
        rows = [row for group in self._groups for row in group.rows]
        numbers = {row: number for number, row in enumerate(rows)}
        found = ranks.gather(([numbers[row] for row in self.refused], [numbers[row] for row in self._left_out]))
        self.refused = {rows[number] for refused, _ in found for number in refused}
        self._left_out = {rows[number] for _, left_out in found for number in left_out}


def without(groups: Sequence[Group], out: AbstractSet[Row]) -> list[Group]:
    """The groups as if these rows had never been in them, and those that had no others had never been."""
    kept = [tuple(row for row in group.rows if row not in out) for group in groups]
    return [replace(group, rows=rows) for group, rows in zip(groups, kept, strict=True) if rows]


def _is_judged(row: Row) -> bool:
    return row.external and row.advantage > 0
