"""Which matrices a parameter holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmuon import ConfigError
from meshmuon.matrices import MatrixSet, matrices_inside

sizes = st.integers(0, 9)


@pytest.mark.parametrize(
    ("name", "shape", "options", "expected"),
    [
        ("w", (3, 5), {}, MatrixSet(1, 3, 5)),
        ("experts.w", (3, 5), {"expert_keys": ["experts"]}, MatrixSet(1, 3, 5)),
        ("w", (3, 5), {"conv": "flatten"}, MatrixSet(1, 3, 5)),
        ("experts.w", (4, 3, 5), {"expert_keys": ["experts"]}, MatrixSet(4, 3, 5, lead=1)),
        ("my_experts_w", (4, 3, 5), {"expert_keys": ("none", "expert")}, MatrixSet(4, 3, 5, lead=1)),
        ("experts.w", (1, 3, 5), {"expert_keys": ["experts"]}, MatrixSet(1, 3, 5, lead=1)),
        ("conv", (8, 3, 5), {"conv": "flatten"}, MatrixSet(1, 8, 15)),
        ("conv", (8, 3, 2, 2), {"conv": "flatten"}, MatrixSet(1, 8, 12)),
        ("conv", (8, 3, 2, 2, 2), {"conv": "flatten"}, MatrixSet(1, 8, 24)),
        ("experts.w", (4, 3, 5), {"expert_keys": ["experts"], "conv": "flatten"}, MatrixSet(4, 3, 5, lead=1)),
        ("other.w", (4, 3, 5), {"expert_keys": ["experts"], "conv": "flatten"}, MatrixSet(1, 4, 15)),
        ("experts.w", (4, 3, 5, 2), {"expert_keys": ["experts"], "conv": "flatten"}, MatrixSet(1, 4, 30)),
    ],
)
def test_what_is_inside(name: str, shape: tuple[int, ...], options: dict[str, object], expected: MatrixSet) -> None:
    assert matrices_inside(name, shape, **options) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (7,)])
def test_vectors_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"norm: shape .* has no rows and columns.*use_muon=False"):
        matrices_inside("norm", shape, conv="flatten", expert_keys=["norm"])


@pytest.mark.parametrize(
    ("name", "shape", "keys"),
    [("w", (2, 3, 4), []), ("w", (2, 3, 4), ["experts"]), ("experts", (2, 3, 4, 5), ["experts"]), ("w", (1, 1, 1, 1, 1), [])],
)
def test_more_dims_are_refused_with_both_ways_out(name: str, shape: tuple[int, ...], keys: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: shape .* more than two dims.*expert_keys=\[\.\.\.\].*conv=\"flatten\""):
        matrices_inside(name, shape, expert_keys=keys)


@given(st.lists(sizes, min_size=2, max_size=5), st.booleans())
def test_every_element_is_in_one_matrix(shape: list[int], experts: bool) -> None:
    found = matrices_inside("experts", shape, expert_keys=["experts"] if experts else [], conv="flatten")
    assert found.count * found.rows * found.cols == math.prod(shape)
