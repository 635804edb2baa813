import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.batches import Group, MicroBatch, Row, collate, plan, size
from tests.examples import few


def group(prompt: int, *lengths: int) -> Group:
    return Group(tuple(range(prompt)), tuple(Row(tuple(range(100, 100 + n)), 1.0) for n in lengths))


def seen_by(batch: MicroBatch) -> list[list[int]]:
    """For each position (1 or 0) which positions its tile lets it see; fails if it is in several tiles or in none."""
    assert batch.packed is not None
    width = batch.ids.shape[1]
    seen: dict[int, list[int]] = {}
    for tile in batch.packed.tiles:
        places = torch.arange(width)[tile.rows].view(tile.count, tile.length)
        real = torch.ones_like(places) if tile.real is None else tile.real.view(places.shape)
        unseen = tile.unseen.expand(tile.count, -1, -1)
        for block, kept, hidden in zip(places, real.tolist(), unseen, strict=True):
            for number, place in enumerate(block.tolist()):
                if kept[number]:
                    assert place not in seen
                    line = torch.zeros(width, dtype=torch.long)
                    for piece in (*tile.seen, block[~hidden[number]]):
                        line[piece] = 1
                    seen[place] = line.tolist()
    return [seen[place] for place in range(width)]


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
        assert size(parts, packing=packing) <= budget or single
        assert packing or all(len(part.rows) == 1 for part in parts)


def test_completions_repeat_their_prompt_no_more_often_than_they_must() -> None:
    [[short], *rest] = plan([group(200, *[16] * 8)], 8192)
    assert len(short.rows) == 8
    assert not rest
    halves = plan([group(100, *[101] * 8)], 500)
    assert [[len(part.rows) for part in parts] for parts in halves] == [[4], [4]]


def test_layout_of_a_packed_group() -> None:
    g = Group((10, 11), (Row((20, 21, 22), 1.0), Row((30,), 1.0), Row((40, 41), 1.0)))
    batch = collate([g], "cpu")
    assert batch.ids.tolist() == [[10, 11, 20, 21, 40]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.sources.tolist() == [1, 2, 3, 1, 1, 4]
    assert batch.targets.tolist() == [20, 21, 22, 30, 40, 41]
    assert seen_by(batch) == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]


def test_rows_apart_are_padded_on_the_right() -> None:
    batch = collate([group(3, 2), group(2, 2)], "cpu", packing=False)
    assert batch.packed is None
    assert batch.ids.tolist() == [[0, 1, 2, 100], [0, 1, 100, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.sources.tolist() == [2, 3, 5, 6]


@few(20)
@given(groups=groups)
def test_every_position_is_computed_once_and_sees_what_it_should(groups: list[Group]) -> None:
    texts: list[list[tuple[int, int]]] = []
    for number, g in enumerate(groups):
        prompt = [(number, 0)] * len(g.prompt)
        texts += [prompt, *([(number, n)] * (len(row.tokens) - 1) for n, row in enumerate(g.rows, start=1))]
    owners = [owner for text in texts for owner in text]
    of_group, of_text = torch.tensor(owners).T
    text = (of_text[:, None] == of_text) | (of_text == 0)
    expected = ((of_group[:, None] == of_group) & text).long().tril()
    assert seen_by(collate(groups, "cpu")) == expected.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_padding_costs_little(seed: int) -> None:
    rng = random.Random(seed)
    many = [group(rng.randint(20, 200), *[rng.randint(1, 32) for _ in range(8)]) for _ in range(32)]
    batches = plan(many, 4096, packing=False)
    padded = sum(size(parts, packing=False) for parts in batches)
    assert padded < 1.3 * sum(part.length for parts in batches for part in parts)
