"""Sums of products that have the same bits however the elements are cut, and the reductions that they take."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from meshmuon.execute import weight_sums
from meshmuon.execute.weight_sums import add_products, new_table, sums_of
from meshmuon.transport import Exchange
from tests.dist.test_cases import run_case
from tests.support.cases import Case, Param
from tests.support.random_layouts import Layouts

ELEMENTS = st.one_of(*(st.floats(-(2.0**power), 2.0**power, width=32) for power in (1, 127, -120)))


def sums(weights: Tensor, updates: Tensor, cuts: list[int], *, last_first: bool) -> list[float]:
    """Of one matrix in pieces, each in a table of its own, as on ranks of their own."""
    edges = [0, *sorted(cuts), len(weights)]
    pieces = [(weights[a:b], updates[a:b]) for a, b in pairwise(edges)]
    total = new_table(1, weights.device)
    for weight, update in reversed(pieces) if last_first else pieces:
        table = new_table(1, weights.device)
        add_products(table, weight[None], update[None])
        total += table
    return sums_of(total)[0].tolist()


@settings(max_examples=200)
@given(st.lists(st.tuples(ELEMENTS, ELEMENTS), min_size=1, max_size=30), st.data())
def test_any_cut_gives_the_same_bits_and_the_right_number(pairs: list[tuple[float, float]], data: Any) -> None:
    """Within 2⁻⁶⁴ of the largest product for each element, and the rounding of partial sums."""
    weights, updates = torch.tensor(pairs).unbind(1)
    cuts = data.draw(st.lists(st.integers(0, len(pairs)), max_size=5))
    with patch.object(weight_sums, "_STRETCH", data.draw(st.sampled_from([1, 3, 7, 100]))):
        found = sums(weights, updates, cuts, last_first=data.draw(st.booleans()))
    assert found == sums(weights, updates, [], last_first=False)
    for value, (a, b) in zip(found, ((weights, weights), (updates, updates), (weights, updates)), strict=True):
        products = [Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        largest = max(map(abs, products))
        size = sum(map(abs, products))  # partial sums that cancel are no larger
        bound = len(products) * max(largest * Fraction(1, 2**64), Fraction(1, 2**319)) + size * Fraction(1, 2**51)
        assert abs(Fraction(value) - sum(products)) <= bound


@pytest.mark.parametrize("pairs", [[(1e10, 1e10), (1e10, -1e10), (0.3, 1.0)], [(1e10, 1e10), (0.75, 1.0)]], ids=str)
def test_what_is_far_below_the_largest_product_counts_nowhere(pairs: list[tuple[float, float]]) -> None:
    """Neither where the largest ones cancel, nor if a piece of its own would have room for it, nor by rounding up
    beside them.
    """
    weights, updates = torch.tensor(pairs).unbind(1)
    together = sums(weights, updates, [], last_first=False)
    assert together[2] == (0.0 if len(pairs) == 3 else float(weights[0].double() * updates[0].double()))
    for cuts in ([1], [2], [1, 2]):
        assert sums(weights, updates, cuts, last_first=False) == together


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
def test_what_is_not_finite_or_too_large_shows_in_the_sum(bad: float) -> None:
    weights, updates = torch.tensor([1.0, bad, 2.0], dtype=torch.float64), torch.ones(3)
    for cuts in ([], [1], [1, 2]):
        weight, update, inner = sums(weights, updates, cuts, last_first=False)
        assert math.isnan(weight)
        assert update == 3.0
        assert math.isnan(inner) == (not math.isfinite(bad))


@pytest.mark.parametrize(
    ("rule", "params", "waves", "reductions"),
    [
        ("normuon", (Param((8, 6), 0, (Shard(0),)),), 1, 0),
        ("hyperball", (Param((8, 6), None), Param((4, 5, 6), 0, (Shard(0),))), 0, 0),
        ("hyperball", (Param((8, 6), 0, (Shard(1),)), Param((4, 5, 6), 0, (Shard(0),))), 1, 1),
        ("hyperball", (Param((8, 6), 0, (Replicate(),)), *[Param((6, 8), 0, (Shard(0),))] * 3), 3, 1),
        ("hyperball", (Param((8, 6), 0, (Replicate(),)), *[Param((6, 8), 0, (Shard(0),))] * 15), 15, 10),
    ],
    ids=["a rule that does not ask", "whole matrices", "one wave", "three waves", "more waves than are in flight"],
)
def test_a_step_takes_one_reduction(rule: str, params: tuple[Param, ...], waves: int, reductions: int) -> None:
    """For all waves that are in flight in the end, and one for each before them. What nobody asks for costs none."""
    phases = list[str]()
    add_up = Exchange.add_up

    def counted(self: Exchange, values: Tensor, *, phase: str = "") -> None:
        phases.append(phase)
        add_up(self, values, phase=phase)

    with patch.object(Exchange, "add_up", counted):
        wire = run_case(Case(params, {"rule": rule, "chunk_size": 1}, 1), Layouts((2,)))
    assert phases == ["scatter"] * 2 * reductions
    if rule == "hyperball":  # nothing else travels but pieces, there and back
        assert wire.calls == ({0: 2 * waves, 1: 2 * waves} if waves else {})
