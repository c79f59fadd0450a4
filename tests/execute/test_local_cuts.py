"""Views of the parts of local tensors: no copies, and few views. That they have the right elements, tests/dist
shows.
"""

from __future__ import annotations

import pytest
import torch

from meshmuon.execute.views import LocalWindow, cut_out, window_of
from meshmuon.layout import Ranges
from meshmuon.matrices import StridedRange


@pytest.mark.parametrize(
    ("held", "views"), [(((0, 48),), 1), (((1, 48),), 2), (((1, 43),), 3), (((1, 7), (13, 24)), 2)], ids=str
)
def test_a_range_that_a_rank_holds_takes_one_view_beside_its_ends(held: Ranges, views: int) -> None:
    """The first 4 of every 6 rows of (48, 3): all whole blocks of them are one view, however many there are."""
    window = LocalWindow.of((StridedRange(0, 4, 8, 6), StridedRange(0, 3)), held, ((0, 3),))
    local = torch.cat([torch.arange(start, stop) for start, stop in held]).repeat_interleave(3).view(-1, 3)
    inside = torch.full(window.shape((), ()), -1)
    cuts = list(window.cuts((), inside))
    for cut, view in cuts:
        taken = cut_out(local, cut)
        assert taken.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        view.copy_(taken)
    assert inside[:, 0].tolist() == [row for row in local[:, 0].tolist() if row % 6 < 4]
    assert len(cuts) == views


def test_single_rows_take_one_view_without_a_further_dim() -> None:
    whole = torch.arange(3 * 5 * 8).view(3, 5, 8)
    up = window_of(whole, (StridedRange(0, 5), StridedRange(1, 1, 4, 2)), 1)
    assert torch.equal(up, whole[..., 1::2])
    assert up.data_ptr() == whole[..., 1:].data_ptr()
