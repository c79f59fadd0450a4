"""Bytes of pieces on the wire, in int8 with the scales of the blocks that they touch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshmuon.layout import Mesh, Piece, Replicated, Sharded
from meshmuon.plan import INT8, Wire, blocks_touched, cuts_blocks, make_plan, routes_of, wave_sizes
from tests.support.plans import entry, line, options_for, random_entries, random_options

ROWS = Piece(((0, 10),), ((0, 300),), (0,))
COLUMNS = Piece(((0, 10),), ((100, 140), (150, 160)), (0,))


def test_scales_follow_the_elements() -> None:
    assert Wire(2, INT8).of(ROWS) == (6000, 3000 + 10 * 3 * 2, 6000)
    assert Wire(INT8, INT8).of(ROWS) == (3060, 3060, 3060)
    assert Wire(4, INT8).of(COLUMNS) == (2000, 500 + 10 * 2 * 2, 2000)
    assert Wire(2, 2).of(COLUMNS) == (1000, 1000, 1000)
    assert blocks_touched(((256, 384), (0, 129))) == ((0, 3),)
    assert blocks_touched(((0, 10), (300, 310))) == ((0, 1), (2, 3))


def test_bytes_are_half_and_three_quarters_of_bfloat16() -> None:
    params = [entry(f"w{k}", (1024, 4096), line(8), lane=dtypes) for k, dtypes in enumerate([0])]
    sent = {}
    for wire in ((2, None), (2, INT8), (INT8, None)):
        plan = make_plan([replace(params[0], itemsize=wire[0], itemsize_back=wire[1])], options_for())
        sent[wire] = sum(plan.bytes_sent.values())
    assert 0.75 <= sent[2, INT8] / sent[2, None] <= 0.75 * 1.02
    assert 0.5 <= sent[INT8, None] / sent[2, None] <= 0.5 * 1.02


@pytest.mark.parametrize(
    ("cols", "ranks", "cut"), [(1024, 8, False), (1024, 4, False), (1000, 4, True), (300, 2, True), (1100, 1, False)]
)
def test_columns_that_cut_blocks(cols: int, ranks: int, cut: bool) -> None:
    """300 columns over two ranks: 150 each. A short last block cuts nothing."""
    by_columns = entry(shape=(64, cols), mesh=line(ranks), placements=(Sharded(1),))
    by_rows = entry(shape=(64, cols), mesh=line(ranks), placements=(Sharded(0),))
    for param, expected in ((by_columns, cut), (by_rows, False)):
        (sharded,) = param.sharded_matrices(param.layouts[0])
        assert any(cuts_blocks(piece, sharded.cols) for piece in sharded.pieces) == expected


@pytest.mark.parametrize("seed", range(40))
def test_buffers_are_those_of_the_waves(seed: int) -> None:
    """A slot is as large as the largest of the waves that take turns in it; results in another dtype have their own."""
    rng = random.Random(seed)
    itemsize, back = rng.choice([(INT8, None), (2, INT8), (INT8, 4), (4, INT8)])
    params = [replace(one, itemsize=itemsize, itemsize_back=back, lane="lane") for one in random_entries(rng)]
    plan = make_plan(params, random_options(rng))
    for rank in plan.ranks:
        slots: dict[int, list[int]] = {}
        for k, routes in enumerate(routes_of(plan, rank)):
            sizes = wave_sizes(routes, plan.params[0].wire)
            travels = sum(plan.params[0].wire.of(one.piece).gather for one in routes.gather_out)
            assert sizes.staying_offset >= travels
            if back is not None:
                assert sizes.results == sum(plan.params[0].wire.of(one.piece).scatter for one in routes.scatter_out)
            most = slots.setdefault(k % plan.options.in_flight, [0, 0, 0])
            for n, size in enumerate((sizes.shards, sizes.gathered, sizes.results)):
                most[n] = max(most[n], size)
        assert plan.buffer_bytes(rank) == sum(map(sum, slots.values()))


def test_both_directions_are_compared() -> None:
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    param = entry(shape=(64, 256), mesh=mesh, placements=(Replicated(), Sharded(0)), itemsize=2)
    plans = [make_plan([replace(param, itemsize_back=back)], options_for()) for back in (None, INT8)]
    assert plans[0].digest != plans[1].digest
