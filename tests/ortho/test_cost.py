"""The cost model counts what torch counts, and the cheaper form is the one that runs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from meshmuon.ortho import (
    Scheme,
    blocks_for,
    halley,
    hybrid,
    keller,
    orthogonalize,
    orthogonalize_flops,
    polar_express,
    zolotarev,
)
from meshmuon.ortho.blocks import choose_blocks, gram_blocks, standard_blocks
from meshmuon.ortho.kernels.products import BlockedProducts, symmetric_panels

from .oracle import gaussian

# Tall, wide, around the sizes at which leaves, panels and triangles are cut.
SHAPES = (
    (1, 1),
    (1, 40),
    (40, 1),
    (7, 7),
    (9, 30),
    (31, 33),
    (32, 32),
    (96, 64),
    (130, 100),
    (383, 383),
    (384, 390),
    (520, 520),
)
SCHEMES = (polar_express(), keller(1), polar_express(steps=7), zolotarev(), halley(), hybrid())


def counted(work: object) -> int:
    with FlopCounterMode(display=False) as counter:
        work()  # type: ignore[operator]
    return counter.get_total_flops()


@pytest.mark.parametrize("form", ["standard", "gram", "auto"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.name} {len(scheme.steps)}")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_formula_equals_counted_flops(shape: tuple[int, int], scheme: Scheme, form: str) -> None:
    orthogonalize(gaussian(1, 1), scheme)  # the search for safe blocks multiplies too, once
    blocks = blocks_for(*shape, scheme, form=form, dtype=torch.float32)
    work = counted(lambda: orthogonalize(gaussian(*shape), scheme, form=form))
    assert work == orthogonalize_flops(*shape, scheme.steps, blocks)


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_costs_as_many_times_a_matrix(form: str, one_by_one: bool, dtype: torch.dtype) -> None:
    scheme, products = keller(3), BlockedProducts(one_by_one=one_by_one)
    for count, rows, cols in ((1, 12, 30), (4, 12, 30), (3, 30, 12), (2, 386, 10)):
        x, blocks = gaussian(count, rows, cols), blocks_for(rows, cols, scheme, form=form, dtype=dtype)
        work = counted(lambda x=x: orthogonalize(x, scheme, form=form, dtype=dtype, products=products))
        assert work == count * orthogonalize_flops(rows, cols, scheme.steps, blocks)


def is_cut(n: int, k: int) -> bool:
    return n >= 384 or (n >= 192 and k >= 2 * n)


@given(n=st.integers(1, 5000), k=st.integers(1, 10_000))
def test_panels_cover_the_lower_triangle_once(n: int, k: int) -> None:
    panels = symmetric_panels(n, k)
    assert panels[0][0] == 0
    assert panels[-1][1] == n
    assert all(stop == start for (_, stop), (start, _) in pairwise(panels))
    heights = [stop - start for start, stop in panels]
    assert min(heights) >= 1
    if not is_cut(n, k):
        assert len(panels) == 1
    else:
        assert len(panels) == -(-n // (128 if n >= 384 else 96))
        assert max(heights) - min(heights) <= 64  # even, but for edges on multiples of 32
        assert all(start % 32 == 0 for start, _ in panels)


@given(rows=st.integers(1, 2000), cols=st.integers(1, 2000), bf16=st.booleans())
def test_the_cheaper_form_is_chosen(rows: int, cols: int, bf16: bool) -> None:
    scheme, dtype = polar_express(), torch.bfloat16 if bf16 else torch.float32
    candidates = [standard_blocks(scheme), gram_blocks(scheme, dtype)]
    chosen = choose_blocks(rows, cols, scheme, dtype)
    assert chosen in candidates
    assert orthogonalize_flops(rows, cols, scheme.steps, chosen) == min(
        orthogonalize_flops(rows, cols, scheme.steps, blocks) for blocks in candidates
    )


def test_long_matrices_take_the_gram_form_and_short_ones_the_standard() -> None:
    scheme = polar_express()
    assert choose_blocks(64, 64, scheme, torch.float32) == (1,) * 5
    assert choose_blocks(64, 256, scheme, torch.float32) == gram_blocks(scheme, torch.float32)
    assert choose_blocks(256, 64, scheme, torch.float32) == gram_blocks(scheme, torch.float32)
