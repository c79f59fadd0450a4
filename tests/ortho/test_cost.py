"""The cost model counts what torch counts, and the cheaper form is the one that runs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from meshmuon.ortho import keller, orthogonalize, orthogonalize_flops, polar_express
from meshmuon.ortho.blocks import choose_blocks, gram_blocks, standard_blocks
from meshmuon.ortho.kernels.products import BlockedProducts, symmetric_panels

from .oracle import gaussian

TALL_AND_WIDE = ((1, 1), (1, 40), (40, 1), (7, 7), (9, 30), (30, 9), (64, 65))
AROUND_THE_THRESHOLD = ((383, 383), (384, 384), (385, 400), (450, 384), (520, 520))


def counted(work: object) -> int:
    with FlopCounterMode(display=False) as counter:
        work()  # type: ignore[operator]
    return counter.get_total_flops()


@pytest.mark.parametrize("form", ["standard", "gram", "auto"])
@pytest.mark.parametrize("shape", TALL_AND_WIDE + AROUND_THE_THRESHOLD, ids=str)
def test_formula_equals_counted_flops(shape: tuple[int, int], form: str) -> None:
    scheme, x = polar_express(), gaussian(*shape)
    blocks = {
        "standard": standard_blocks(scheme),
        "gram": gram_blocks(scheme, torch.float32),
        "auto": choose_blocks(*shape, scheme, torch.float32),
    }[form]
    assert counted(lambda: orthogonalize(x, scheme, form=form)) == orthogonalize_flops(*shape, scheme.steps, blocks)


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_batch_costs_as_many_times_a_matrix(form: str, one_by_one: bool) -> None:
    scheme = keller(3)
    blocks = standard_blocks(scheme) if form == "standard" else gram_blocks(scheme, torch.float32)
    for count, rows, cols in ((1, 12, 30), (4, 12, 30), (3, 30, 12), (2, 386, 10)):
        x = gaussian(count, rows, cols)
        work = counted(lambda x=x: orthogonalize(x, scheme, form=form, products=BlockedProducts(one_by_one=one_by_one)))
        assert work == count * orthogonalize_flops(rows, cols, scheme.steps, blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 7])
def test_formula_for_every_number_of_steps_and_blocks(steps: int, dtype: torch.dtype) -> None:
    for scheme in (keller(steps), polar_express(steps=steps)):
        blocks = gram_blocks(scheme, dtype)
        work = counted(lambda scheme=scheme: orthogonalize(gaussian(10, 24), scheme, form="gram", dtype=dtype))
        assert work == orthogonalize_flops(10, 24, scheme.steps, blocks)


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
