"""Singular values and orthogonality from a few products, against torch's own decompositions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshmuon import halley, keller, orthogonalize, polar_express, zolotarev
from meshmuon.metrics.spectra import (
    Multiply,
    bound_of,
    by_matrices,
    defects,
    largest_singular_values,
    multiply_each,
    probes,
    squares,
    tridiagonalise,
    wide,
)


def matrices(seed: int, batch: int, rows: int, cols: int, decay: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.logspace(0, -decay, cols)
    return torch.randn(batch, rows, cols, generator=generator) * spectrum


def from_matrices(stacked: Tensor) -> Multiply:
    return by_matrices(stacked, squares(stacked).sqrt().to(stacked.dtype))


def from_gram(stacked: Tensor) -> Multiply:
    """From the Gram matrix that the orthogonalisation computes: of the rescaled matrix, divided by its trace."""
    a = wide(stacked)
    a = a / a.abs().amax((1, 2), keepdim=True).clamp_min(1e-30)
    gram = a @ a.mT
    return partial(multiply_each, gram / gram.diagonal(dim1=1, dim2=2).sum(1).clamp_min(1e-30).view(-1, 1, 1))


def largest(stacked: Tensor, iterations: int, way: Callable[[Tensor], Multiply] = from_matrices) -> Tensor:
    start = probes(min(stacked.shape[1:]))[0].to(stacked.dtype).expand(stacked.size(0), -1)
    return largest_singular_values(tridiagonalise(way(stacked), start, iterations)) * squares(stacked).sqrt()


WAYS = pytest.mark.parametrize("way", [from_matrices, from_gram])


SHAPES = st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40))


@settings(max_examples=60)
@given(SHAPES, st.floats(0, 4), st.integers(1, 8), st.sampled_from([from_matrices, from_gram]))
def test_the_largest_singular_value_is_approached_from_below(
    shape: tuple[int, int, int, int], decay: float, iterations: int, way: Callable[[Tensor], Multiply]
) -> None:
    stacked = matrices(*shape, decay=decay)
    found, true = largest(stacked, iterations, way), torch.linalg.svdvals(stacked.double())[:, 0]
    assert (found <= true * (1 + 1e-5)).all()
    assert (found >= 0).all()
    assert torch.allclose(squares(stacked), stacked.double().square().sum((1, 2)), rtol=1e-5)
    if iterations >= min(stacked.shape[1:]):  # all directions have been seen
        assert torch.allclose(found, true, rtol=1e-4)


@WAYS
@pytest.mark.parametrize(
    ("decay", "iterations", "at_least"), [(0.0, 6, 0.9), (2.0, 6, 0.95), (4.0, 6, 0.99), (0.0, 12, 0.95)]
)
def test_how_near_a_few_iterations_come(
    decay: float, iterations: int, at_least: float, way: Callable[[Tensor], Multiply]
) -> None:
    stacked = matrices(1, 4, 192, 256, decay=decay)
    share = largest(stacked, iterations, way) / torch.linalg.svdvals(stacked.double())[:, 0]
    assert share.min() >= at_least


@WAYS
@pytest.mark.parametrize("iterations", [1, 3, 8])
def test_matrices_without_further_directions(iterations: int, way: Callable[[Tensor], Multiply]) -> None:
    """Of rank one, of equal singular values, of zeros: what is left is rounding, and counts as zero."""
    one = torch.ones(1, 7, 5)
    eye = torch.eye(6, 9).unsqueeze(0) * 3
    assert torch.allclose(
        largest(one, iterations, way), torch.tensor([35.0**0.5]).double(), rtol=1e-5 if iterations > 1 else 1.0
    )
    assert torch.allclose(largest(eye, iterations, way), torch.tensor([3.0]).double(), rtol=1e-5)
    assert not largest(torch.zeros(2, 4, 4), iterations, way).any()


def test_the_largest_does_not_depend_on_scale() -> None:
    stacked = matrices(3, 2, 12, 20)
    for scale in (1e-18, 1e18):
        assert torch.allclose(largest(stacked * scale, 4) / scale, largest(stacked, 4), rtol=1e-5)


@settings(max_examples=30)
@given(SHAPES)
def test_defects_are_means_over_all_directions(shape: tuple[int, int, int, int]) -> None:
    stacked = orthogonalize(matrices(*shape, decay=3.0), polar_express())
    size = min(stacked.shape[1:])
    values = torch.linalg.svdvals(stacked.double())
    expected = torch.stack([(1 - values**2).pow(power).mean(1) for power in (2, 4)], dim=1)
    all_directions = probes(size, size).to(stacked.dtype)
    assert torch.allclose(defects(stacked, all_directions), expected, atol=1e-5)
    sampled = torch.stack([defects(stacked, all_directions[k : k + 1]) for k in range(size)]).mean(0)
    assert torch.allclose(sampled, expected, atol=1e-5), "each direction counts the same"


def test_directions_that_are_lost_are_counted() -> None:
    """An update of rank 16 out of 64: three quarters of its directions are left where they were, at zero."""
    low = matrices(5, 1, 64, 16) @ matrices(6, 1, 16, 80)
    update = orthogonalize(low, polar_express())
    lost = defects(update, probes(64, 64).float())[0, 1]
    assert lost == pytest.approx(0.75, abs=0.01)
    assert defects(orthogonalize(matrices(5, 1, 64, 80), polar_express()), probes(64, 64).float())[0, 1] < 0.01


@pytest.mark.parametrize("l", [1e-2, 1e-3])
def test_the_bound_of_a_scheme_is_the_one_it_was_made_for(l: float) -> None:  # noqa: E741
    for scheme in (polar_express(l=l), halley(l=l), zolotarev(l=l)):
        assert bound_of(scheme) == pytest.approx(l, rel=0.02), scheme.name
    assert 1e-3 < bound_of(keller()) < 3e-3
