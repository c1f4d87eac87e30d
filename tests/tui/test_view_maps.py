"""Treemaps cover their area once; segment maps show every hole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuprobe.model.memory import Block, BlockState, Category, Segment
from gpuprobe.tui.viewer.memory_maps import FREE, ORDERS, PENDING, bars, cells, tile

SIZES = st.lists(st.integers(0, 1 << 40), max_size=60)


@given(SIZES, st.integers(1, 120), st.integers(1, 40))
def test_a_treemap_covers_every_cell_once(sizes: list[int], width: int, height: int) -> None:
    sizes.sort(reverse=True)
    rects = tile(sizes, width, height)
    covered = [
        (x, y)
        for rect in rects
        for x in range(rect.x, rect.x + rect.width)
        for y in range(rect.y, rect.y + rect.height)
    ]
    if not any(sizes):
        assert not rects
        return
    assert sorted(covered) == [(x, y) for x in range(width) for y in range(height)]
    items = [rect.item for rect in rects]
    assert len(set(items)) == len(items)
    assert 0 in items
    assert all(sizes[item] > 0 for item in items)


@given(st.lists(st.integers(50, 1000), min_size=1, max_size=12))
def test_areas_are_about_proportional(sizes: list[int]) -> None:
    sizes.sort(reverse=True)
    area = {rect.item: rect.width * rect.height for rect in tile(sizes, 400, 200)}
    for item, size in enumerate(sizes):
        expected = 400 * 200 * size / sum(sizes)
        assert abs(area[item] - expected) <= 0.1 * expected + 200


STATES = (BlockState.ALLOCATED, BlockState.PENDING_FREE, BlockState.INACTIVE)


def segment(blocks: list[tuple[int, BlockState]], address: int = 4096) -> Segment:
    at, made = address, []
    for size, state in blocks:
        made.append(Block(at, size, size, state))
        at += size
    return Segment(0, address, at - address, 0, "large", blocks=tuple(made))


@given(
    st.lists(st.tuples(st.integers(1, 1 << 30), st.sampled_from(STATES)), min_size=1, max_size=30),
    st.integers(1, 200),
)
def test_a_segment_s_bar_shows_what_is_free(
    blocks: list[tuple[int, BlockState]], width: int
) -> None:
    one = segment(blocks)
    (bar,) = bars([one], {block.address: Category.GRADIENT.code for block in one.blocks})
    assert sum(size for _, size in bar.runs) == bar.total == one.total_size
    assert bar.free == one.cached_size
    shown = cells(bar, width)
    assert len(shown) == width
    if bar.total >= width:
        # A cell is full exactly where none of its bytes is free, and a dot where all are.
        edges = [i * bar.total // width for i in range(width + 1)]
        for column, (char, kind) in enumerate(shown):
            free = _free(one, edges[column], edges[column + 1])
            size = edges[column + 1] - edges[column]
            assert (char == "█") == (free == 0)
            assert (char == "·") == (free == size) == (kind == FREE)


def _free(one: Segment, low: int, high: int) -> int:
    low, high = one.address + low, one.address + high
    return sum(
        max(0, min(high, b.address + b.size) - max(low, b.address))
        for b in one.blocks
        if b.state is BlockState.INACTIVE
    )


def test_a_small_segment_fills_its_width_and_kinds_are_told_apart() -> None:
    (bar,) = bars([segment([(2, BlockState.ALLOCATED), (2, BlockState.PENDING_FREE)])], {4096: 3})
    shown = cells(bar, 8)
    assert [kind for _, kind in shown] == [3] * 4 + [PENDING] * 4
    assert bar.label.strip() == "4 B   0% free  large"


def test_orders() -> None:
    full = segment([(100, BlockState.ALLOCATED)], 0)
    holes = segment([(30, BlockState.ALLOCATED), (60, BlockState.INACTIVE)], 1000)
    large = segment([(990, BlockState.ALLOCATED), (10, BlockState.INACTIVE)], 2000)
    found = {
        order: [bar.address for bar in bars([large, full, holes], {}, order)] for order in ORDERS
    }
    assert found == {
        "address": [0, 1000, 2000],
        "most free first": [1000, 2000, 0],
        "largest first": [2000, 0, 1000],
    }
