"""Norms over ranks."""

from __future__ import annotations

import pytest
import torch

from meshmuon.clipping.norms import reduce_norm


@pytest.mark.parametrize(
    ("failed", "difference", "unusable"), [(False, 0.0, False), (True, 0.0, True), (False, -1.0, True), (True, -1.0, True)]
)
def test_failures_and_differences_do_not_cancel(failed: bool, difference: float, unusable: bool) -> None:
    zero = torch.zeros((), dtype=torch.float64)
    _, _, found = reduce_norm(zero, zero, (float(failed), difference, 0.0), [], largest=False)
    assert bool(found) is unusable
