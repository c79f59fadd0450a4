"""Bytes of pieces on the wire, in one dtype or two."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshmuon.layout import Mesh, Piece, Replicated, Sharded
from meshmuon.plan import Wire, make_plan, routes_of, wave_sizes
from tests.support.plans import entry, options_for, random_entries, random_options

PIECE = Piece(((0, 10),), ((100, 140), (150, 160)), (0,))


def test_two_dtypes_share_memory_at_multiples_of_8_bytes() -> None:
    assert Wire(2, 4).of(PIECE) == (1000, 2000, 2000)
    assert Wire(2, 4).of(Piece(((0, 1),), ((0, 3),), (0,))) == (6, 12, 16)
    assert Wire(2, 2).of(PIECE) == (1000, 1000, 1000)
    assert Wire(2, 4).itemsize == 3


@pytest.mark.parametrize("seed", range(40))
def test_buffers_are_those_of_the_waves(seed: int) -> None:
    """A slot is as large as the largest of the waves that take turns in it; results in another dtype have their own."""
    rng = random.Random(seed)
    itemsize, back = rng.choice([(2, None), (2, 4), (4, 2), (8, 2)])
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
    plans = [make_plan([replace(param, itemsize_back=back)], options_for()) for back in (None, 4)]
    assert plans[0].digest != plans[1].digest
