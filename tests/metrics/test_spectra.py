"""Singular values from a few products, against torch's own decompositions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshmuon.metrics.spectra import (
    Multiply,
    by_matrices,
    largest_singular_values,
    multiply_each,
    squares,
    start_vector,
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
    start = start_vector(min(stacked.shape[1:])).to(stacked.dtype).expand(stacked.size(0), -1)
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
