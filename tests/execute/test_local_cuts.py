"""Views of the parts of local tensors: right elements, no copies, few views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshmuon.execute.views import LocalWindow, cut_out, cut_out_of_broadcast, window_of
from meshmuon.layout import Ranges
from meshmuon.matrices import StridedRange, Window


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ((), [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13]]),
        ((slice(1, 3),), [[2, 3], [4, 5]]),
        ((slice(0, 7, 3), slice(0, 1)), [[0], [6], [12]]),
        ((StridedRange(1, 2, 2, 4),), [[[2, 3], [4, 5]], [[10, 11], [12, 13]]]),  # rows 1 and 2, 5 and 6
    ],
)
def test_cuts_are_views(cut: Any, expected: list[Any]) -> None:
    tensor = numbered(7, 2)
    taken = cut_out(tensor, cut)
    assert taken.tolist() == expected
    assert taken.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "cut", [(), (slice(1, 4),), (slice(1, 2), slice(0, 6, 2)), (slice(0, 2), StridedRange(1, 2, 2, 3))], ids=str
)
def test_what_is_broadcast_is_cut_to_the_same_shape(cut: Any) -> None:
    whole = numbered(5, 6, 4)
    for rows, cols in ((whole[:, :, :1], numbered(1, 1, 4)), (numbered(5, 1, 1), whole[:1])):
        expected = cut_out((rows + cols).contiguous(), cut)
        found = cut_out_of_broadcast(rows, cut) + cut_out_of_broadcast(cols, cut)
        assert torch.equal(found, expected)


@st.composite
def windows(draw: Any) -> tuple[bool, Window, Ranges, tuple[int, int]]:
    """A window that cuts the rows or the columns of a matrix, and the ranges of that dim that a rank holds."""
    sizes, repeats, other = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3)), draw(st.integers(2, 5)), 3
    part = draw(st.integers(0, len(sizes) - 1))
    strided, outputs = StridedRange(sum(sizes[:part]), sizes[part], repeats, sum(sizes)), sum(sizes) * repeats
    edges = sorted(draw(st.sets(st.integers(0, outputs), min_size=2, max_size=6)))
    held = tuple(zip(edges[::2], edges[1::2], strict=False))
    if draw(st.booleans()):
        return False, (strided, StridedRange(0, other)), held, (outputs, other)
    return True, (StridedRange(0, other), strided), held, (other, outputs)


@given(windows())
def test_local_windows_take_the_elements_of_the_part_in_its_order(drawn: tuple[bool, Window, Ranges, tuple[int, int]]) -> None:
    """Two matrices of a stack: what the cuts take equals what torch's indexing of the whole tensor takes."""
    flipped, window, held, shape = drawn
    whole, dim = numbered(2, *shape), 2 if flipped else 1
    here = torch.tensor([index for start, stop in held for index in range(start, stop)])
    local = whole.index_select(dim, here)
    ends = (((0, shape[0]),), held) if flipped else (held, ((0, shape[1]),))
    local_window = LocalWindow.of(window, *ends)
    part = window[dim - 1]
    of_part = [part.start + block * part.period + k for block in range(part.count) for k in range(part.size)]
    expected = whole.index_select(dim, torch.tensor([index for index in here.tolist() if index in of_part], dtype=torch.long))
    assert local_window.shape((2,), ()) == expected.shape
    if not expected.numel():
        return
    buffer = torch.full(expected.shape, -1)
    cuts = list(local_window.cuts((slice(0, 2),), buffer))
    for cut, view in cuts:
        assert view.shape == cut_out(local, cut).shape
        view.copy_(cut_out(local, cut))
    assert torch.equal(buffer, expected)
    assert len(cuts) <= 3 * len(held)
    assert torch.equal(
        window_of(whole, window, 1).reshape(2, *(one.length for one in window)), whole.index_select(dim, torch.tensor(of_part))
    )


def test_single_rows_take_one_view_without_a_further_dim() -> None:
    whole = numbered(3, 5, 8)
    up = window_of(whole, (StridedRange(0, 5), StridedRange(1, 1, 4, 2)), 1)
    assert torch.equal(up, whole[..., 1::2])
    assert up.data_ptr() == whole[..., 1:].data_ptr()
