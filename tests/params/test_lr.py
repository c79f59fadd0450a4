"""The learning-rate rules, in numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from meshmuon import orthogonalize, polar_express
from meshmuon.params.lr import lr_factor, update_rms
from tests.support.bounds import orthogonalize_error


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original", "spectral"])
@pytest.mark.parametrize(("rows", "cols"), [(24, 24), (60, 20), (20, 60)])
def test_predicted_rms_is_that_of_a_real_update(rule: str, rows: int, cols: int) -> None:
    grad = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    update = orthogonalize(grad, polar_express(steps=10))
    measured = lr_factor(rule, rows, cols) * update.square().mean().sqrt().item()
    assert update_rms(rule, rows, cols) == pytest.approx(
        measured, rel=orthogonalize_error(grad, polar_express(steps=10))
    )
