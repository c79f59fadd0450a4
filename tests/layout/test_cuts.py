"""Cuts: properties of every chain. That they are torch's is shown by test_against_torch.py."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmuon.layout.layout import Ranges, cut, local_indices, positions, tiles
from meshmuon.matrices import StridedRange

chains = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), max_size=4).map(tuple)


@given(st.integers(0, 40), chains)
def test_parts_tile_the_dim_in_order(size: int, chain: tuple[tuple[int, int], ...]) -> None:
    held = cut(size, chain)
    assert len(held) == math.prod(parts for parts, _ in chain)
    assert tiles(size, held)
    for ranges in held:
        assert all(start < stop for start, stop in ranges)
        assert all(one[1] < other[0] for one, other in pairwise(ranges)), "neighbours are one range"


@given(st.integers(0, 40), st.integers(1, 9))
def test_one_strided_axis_that_takes_all(size: int, split_factor: int) -> None:
    """Over one rank a strided sharding changes nothing."""
    assert cut(size, ((1, split_factor),)) == cut(size, ())


@pytest.mark.parametrize(
    ("size", "covers", "expected"),
    [
        (0, [(), ()], True),
        (5, [((3, 5),), ((0, 3),)], True),
        (5, [((0, 1), (3, 5)), (), ((1, 3),)], True),
        (5, [()], False),
        (5, [((0, 2),), ((3, 5),)], False),  # a gap
        (5, [((1, 5),)], False),  # a gap at the start
        (5, [((0, 3),), ((2, 5),)], False),  # an overlap
        (5, [((0, 5),), ((1, 2),)], False),  # one inside another
        (5, [((0, 4),)], False),  # too short
        (5, [((0, 5),), ((5, 6),)], False),  # too long
        (5, [((0, 5),), ((5, 5),)], False),  # an empty range
    ],
)
def test_tiles(size: int, covers: list[Ranges], expected: bool) -> None:
    assert tiles(size, covers) is expected


@st.composite
def parts_and_ranges(draw: Any) -> tuple[StridedRange, Ranges]:
    """A part of a dim, and ranges of the same dim as a rank may hold them."""
    size, gap, count, start = (draw(st.integers(*ends)) for ends in ((1, 4), (1, 4), (1, 5), (0, 3)))
    part = StridedRange(start, size, count, size + gap) if count > 1 else StridedRange(start, size)
    length_of_dim = part.stop + draw(st.integers(0, 4))
    edges = sorted(draw(st.sets(st.integers(0, length_of_dim), max_size=8)))
    return part, tuple(zip(edges[::2], edges[1::2], strict=False))


@given(parts_and_ranges())
def test_a_part_of_what_a_rank_holds(drawn: tuple[StridedRange, Ranges]) -> None:
    part, ranges = drawn
    of_part = [part.start + block * part.period + k for block in range(part.count) for k in range(part.size)]
    held = [index for start, stop in ranges for index in range(start, stop)]
    assert [k for start, stop in positions(ranges, part) for k in range(start, stop)] == [
        k for k, index in enumerate(of_part) if index in held
    ]
    found = local_indices(ranges, part)
    places = [
        one.start + block * one.period + k for one in found for block in range(one.count) for k in range(one.size)
    ]
    assert places == [k for k, index in enumerate(held) if index in of_part]
    assert len(found) <= 3 * len(ranges)
    assert len(found) <= 1 or part.count > 1


def test_a_few_ranges_for_thousands_of_blocks() -> None:
    """Gate and up of gpt-oss, and heads of 128 rows: the number of local ranges does not grow with the number of
    blocks.
    """
    assert local_indices(((0, 5760),), StridedRange(1, 1, 2880, 2)) == (StridedRange(1, 1, 2880, 2),)
    assert local_indices(((1000, 5000),), StridedRange(128, 128, 112, 384)) == (
        StridedRange(0, 24),
        StridedRange(280, 128, 10, 384),
    )
    # FSDP over TP: a rank holds 8 chunks of whole heads, which lie in its local tensor as regularly as in the weight.
    chunks = tuple((k * 768, k * 768 + 384) for k in range(8))
    assert local_indices(chunks, StridedRange(128, 128, 16, 384)) == (StridedRange(128, 128, 8, 384),)
