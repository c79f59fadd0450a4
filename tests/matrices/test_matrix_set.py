"""Which matrices a parameter holds."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmuon import ConfigError
from meshmuon.matrices import MatrixOptions, MatrixSet, ParamMatrices, check_matrix_options, find_matrices

sizes = st.integers(0, 9)


@pytest.mark.parametrize(
    ("name", "shape", "options", "expected"),
    [
        ("w", (3, 5), {}, MatrixSet(1, 3, 5)),
        ("experts.w", (3, 5), {"expert_keys": ["experts"]}, MatrixSet(1, 3, 5)),
        ("w", (3, 5), {"conv": "flatten"}, MatrixSet(1, 3, 5)),
        ("experts.w", (4, 3, 5), {"expert_keys": ["experts"]}, MatrixSet(4, 3, 5, stack_dims=1)),
        ("my_experts_w", (4, 3, 5), {"expert_keys": ("none", "expert")}, MatrixSet(4, 3, 5, stack_dims=1)),
        ("experts.w", (1, 3, 5), {"expert_keys": ["experts"]}, MatrixSet(1, 3, 5, stack_dims=1)),
        ("conv", (8, 3, 5), {"conv": "flatten"}, MatrixSet(1, 8, 15)),
        ("conv", (8, 3, 2, 2), {"conv": "flatten"}, MatrixSet(1, 8, 12)),
        ("conv", (8, 3, 2, 2, 2), {"conv": "flatten"}, MatrixSet(1, 8, 24)),
        ("experts.w", (4, 3, 5), {"expert_keys": ["experts"], "conv": "flatten"}, MatrixSet(4, 3, 5, stack_dims=1)),
        ("other.w", (4, 3, 5), {"expert_keys": ["experts"], "conv": "flatten"}, MatrixSet(1, 4, 15)),
        ("experts.w", (4, 3, 5, 2), {"expert_keys": ["experts"], "conv": "flatten"}, MatrixSet(1, 4, 30)),
    ],
)
def test_what_is_inside(name: str, shape: tuple[int, ...], options: dict[str, Any], expected: MatrixSet) -> None:
    assert find_matrices(name, shape, MatrixOptions(**options)) == (expected,)


@pytest.mark.parametrize("shape", [(), (7,)])
def test_vectors_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"norm: shape .* has no rows and columns.*use_muon=False"):
        find_matrices("norm", shape, MatrixOptions(conv="flatten", expert_keys=("norm",)))


@pytest.mark.parametrize(
    ("name", "shape", "keys"),
    [
        ("w", (2, 3, 4), []),
        ("w", (2, 3, 4), ["experts"]),
        ("experts", (2, 3, 4, 5), ["experts"]),
        ("w", (1, 1, 1, 1, 1), []),
    ],
)
def test_more_dims_are_refused_with_both_ways_out(name: str, shape: tuple[int, ...], keys: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=rf"{name}: shape .* more than two dims.*expert_keys=\[\.\.\.\].*conv=\"flatten\""
    ):
        find_matrices(name, shape, MatrixOptions(expert_keys=tuple(keys)))


@given(st.lists(sizes, min_size=2, max_size=5), st.booleans())
def test_every_element_is_in_one_matrix(shape: list[int], experts: bool) -> None:
    keys = ("experts",) if experts else ()
    (found,) = find_matrices("experts", shape, MatrixOptions(expert_keys=keys, conv="flatten"))
    assert found.count * found.rows * found.cols == math.prod(shape)


IN_OUT = {"matrices": {"experts": ParamMatrices(dims="in_out")}}


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((6, 5), {"split": (3, 1, 2)}, [(3, 5, ((0, 3), (0, 5))), (1, 5, ((3, 4), (0, 5))), (2, 5, ((4, 6), (0, 5)))]),
        ((6, 5), {"split": 3}, [(3, 5, ((0, 3), (0, 5))), (3, 5, ((3, 6), (0, 5)))]),
        ((4, 6, 5), {"split": (2, 4)}, [(2, 5, ((0, 2), (0, 5))), (4, 5, ((2, 6), (0, 5)))]),
        (
            (4, 5, 6),
            {"split": (2, 4), **IN_OUT},
            [(5, 2, ((0, 5), (0, 2))), (5, 4, ((0, 5), (2, 6)))],
        ),
        ((6, 5), {"split": lambda name, shape: shape[0] // 2 if name == "experts" else None}, None),
        ((6, 2, 3, 3), {"conv": "flatten", "split": 2}, [(2, 18, ((k, k + 2), (0, 18))) for k in (0, 2, 4)]),
    ],
)
def test_splits_cut_the_outputs(shape: tuple[int, ...], options: dict[str, Any], expected: Any) -> None:
    found = find_matrices("experts", shape, MatrixOptions(expert_keys=("experts",), **options))
    expected = expected or [(3, 5, ((0, 3), (0, 5))), (3, 5, ((3, 6), (0, 5)))]
    ranges = [tuple((part.start, part.stop) for part in one.window or ()) for one in found]
    assert [(one.rows, one.cols, window) for one, window in zip(found, ranges, strict=True)] == expected
    assert all(part.count == 1 and part.length == part.size for one in found for part in one.window or ())
    assert sum(one.count * one.rows * one.cols for one in found) == math.prod(shape)
    for one in found:
        assert one.lr_shape == ((one.cols, one.rows) if "matrices" in options else (one.rows, one.cols))


def test_a_function_may_leave_a_weight_whole() -> None:
    assert len(find_matrices("w", (6, 5), MatrixOptions(split=lambda name, shape: None))) == 1


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ((3, 2), r"w: split=\(3, 2\) adds up to 5, but it has 6 outputs"),
        (4, "w: split=4, but 6 outputs do not divide into such parts"),
        (0, "w: split=0 must be sizes of parts such as"),
        (True, "w: split=True must be sizes"),
        ((6, 0), r"w: split=\(6, 0\) must be sizes"),
        ((), r"w: split=\(\) must be sizes"),
        ("heads", "w: split='heads' must be sizes"),
        (2.0, "w: split=2.0 must be sizes"),
    ],
)
def test_splits_that_do_not_fit(split: Any, message: str) -> None:
    for way in (split, lambda name, shape: split):
        with pytest.raises(ConfigError, match=message):
            find_matrices("w", (6, 5), MatrixOptions(split=way))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conv": "unfold"}, r"conv='unfold' is unknown; write one of \(None, 'flatten', 'adamw'\)"),
        ({"split": "qkv"}, "split: split='qkv' must be sizes"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_matrix_options(MatrixOptions(**options))
