import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.batches import Group, Row, collate, padded_size, plan


def group(prompt: int, *lengths: int) -> Group:
    return Group(tuple(range(prompt)), tuple(Row(tuple(range(100, 100 + n)), 1.0) for n in lengths))


groups = st.lists(
    st.builds(lambda p, ls: group(p, *ls), st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=8)),
    min_size=1,
    max_size=5,
)


@given(groups=groups, budget=st.integers(1, 400), packing=st.booleans())
def test_every_row_once_and_within_the_budget(groups: list[Group], budget: int, packing: bool) -> None:
    batches = plan(groups, budget, packing=packing)
    rows = [row for parts in batches for part in parts for row in part.rows]
    assert sorted(map(id, rows)) == sorted(id(row) for g in groups for row in g.rows)
    for parts in batches:
        single = len(parts) == 1 and len(parts[0].rows) == 1
        assert padded_size(parts) <= budget or single
        assert packing or all(len(part.rows) == 1 for part in parts)


def test_short_completions_share_their_prompt_and_long_ones_do_not() -> None:
    [[shared]] = plan([group(200, *[16] * 8)], 8192)
    assert len(shared.rows) == 8
    apart = plan([group(50, *[2000] * 4)], 10**6)
    assert all(len(part.rows) == 1 for parts in apart for part in parts)


def test_layout_of_a_packed_group() -> None:
    g = Group((10, 11), (Row((20, 21, 22), 1.0), Row((30,), 1.0), Row((40, 41), 1.0)))
    batch = collate([g], "cpu", torch.float32)
    assert batch.ids.tolist() == [[10, 11, 20, 21, 40]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.sources.tolist() == [1, 2, 3, 1, 1, 4]
    assert batch.targets.tolist() == [20, 21, 22, 30, 40, 41]
    assert batch.mask is not None
    seen = (batch.mask[0, 0] == 0).int().tolist()
    assert seen == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]


def test_a_row_alone_needs_no_mask() -> None:
    assert collate([group(3, 2), group(5, 4)], "cpu", torch.float32).mask is None


@pytest.mark.parametrize("seed", range(3))
def test_padding_costs_little(seed: int) -> None:
    rng = random.Random(seed)
    many = [group(rng.randint(20, 200), *[rng.randint(1, 32) for _ in range(8)]) for _ in range(32)]
    batches = plan(many, 4096)
    padded = sum(map(padded_size, batches))
    assert padded < 1.3 * sum(part.length for parts in batches for part in parts)
