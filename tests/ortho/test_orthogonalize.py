"""orthogonalize: what it makes of singular values and vectors, at any scale, shape and memory layout.

The oracle is U·f(S/‖S‖)·Vᵀ from ``torch.linalg.svd`` in float64. Distances are spectral norms, so a bound on one bounds
the error of every singular value and of the subspaces that belong to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from meshmuon import ConfigError
from meshmuon.ortho import (
    Scheme,
    Workspace,
    default_compute_dtype,
    halley,
    hybrid,
    keller,
    orthogonalize,
    polar_express,
    zolotarev,
)
from meshmuon.ortho.kernels.products import BlockedProducts
from meshmuon.ortho.remez import Quintic
from tests.support.bounds import orthogonalize_error, sum_error, unit

from .oracle import (
    SPECTRA,
    expected,
    gaussian,
    highest,
    largest_singular_value,
    of_kind,
    spectral_distance,
    with_spectrum,
)

FORMS = ("standard", "gram")
SCHEMES = {"polar_express": polar_express(), "keller": keller()}
SHORT = (torch.bfloat16, torch.float16)
by_form = pytest.mark.parametrize("form", FORMS)


def assert_right(x: Tensor, scheme: Scheme, forms: Sequence[str] = FORMS, dtype: torch.dtype | None = None) -> None:
    """The result of every form is as near to the oracle as rounding allows."""
    wanted = torch.stack([expected(matrix, scheme.steps) for matrix in (x if x.dim() == 3 else x.unsqueeze(0))]).view(
        x.shape
    )
    for form in forms:
        result = orthogonalize(x, scheme, form=form, dtype=dtype)
        assert result.dtype == x.dtype
        assert spectral_distance(result, wanted) < orthogonalize_error(x, scheme, form=form, dtype=dtype), form


# Singular values and vectors


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("shape", [(5, 9), (16, 16), (48, 96), (96, 48), (64, 64)], ids=str)
def test_singular_values_and_vectors(shape: tuple[int, int], kind: str, scheme: Scheme) -> None:
    assert_right(of_kind(kind, *shape), scheme)


MIXED = Scheme("mixed", (Quintic(3.0, -3.0, 1.0), Quintic(1.5, -0.5, 0.0), Quintic(0.5, 1.0, -0.25)), "here")
UNEVEN = torch.zeros(4, 6)
UNEVEN[0, 0], UNEVEN[1, 1], UNEVEN[2, 2] = 1e30, 1e29, 1e-30


@pytest.mark.parametrize(
    ("x", "scheme", "dtype"),
    [
        *((of_kind(kind, 390, 400), polar_express(), None) for kind in SPECTRA),  # whose symmetric products are blocked
        (of_kind("log", 400, 390), polar_express(), None),
        *((of_kind(kind, 24, 40, dtype=torch.float64), polar_express(), None) for kind in SPECTRA),
        *((gaussian(12, 30), keller(steps), None) for steps in (1, 2, 3, 6, 8)),
        *((gaussian(12, 30), polar_express(steps=steps), None) for steps in (1, 2, 3, 6, 8)),
        (gaussian(12, 30), MIXED, None),  # whose steps must be taken first to last
        *((gaussian(*shape), polar_express(), None) for shape in ((1, 1), (1, 2), (1, 50), (50, 1))),
        # √m times the largest entry is beyond float32.
        *((3.4e38 * gaussian(6, 10).clamp(-1, 1), polar_express(), dtype) for dtype in (torch.float32, *SHORT)),
        # So close to the end of the range the input itself has few digits; they are all used.
        *((gaussian(6, 10) * scale, polar_express(), torch.float32) for scale in (1e-38, 1e-40, 1e-42, 1e-44)),
        *((gaussian(6, 10) * scale, polar_express(), torch.bfloat16) for scale in (1e-38, 1e-40, 1e-42, 1e-44)),
        *((gaussian(6, 10) * scale, polar_express(), torch.float16) for scale in (1e-38, 1e-40)),
        (
            torch.stack([gaussian(6, 10, seed=k) * scale for k, scale in enumerate((1.0, 1e-20, 1e20))]),
            polar_express(),
            None,
        ),
        (UNEVEN, polar_express(), None),
        # Singular values of at least 0.1 of the largest: a rounding of 2^-8 (2^-11) is amplified about ten times.
        *(
            (with_spectrum(torch.linspace(1, 0.1, min(shape)).double(), *shape), scheme, dtype)
            for shape in ((24, 24), (40, 96))
            for scheme in SCHEMES.values()
            for dtype in SHORT
        ),
    ],
)
def test_matrices_that_are_special(x: Tensor, scheme: Scheme, dtype: torch.dtype | None) -> None:
    assert_right(x, scheme, ("auto", *FORMS), dtype)


def test_the_order_of_steps_matters() -> None:
    x = gaussian(12, 30)
    assert spectral_distance(expected(x, MIXED.steps), expected(x, MIXED.steps[::-1])) > 0.01
    assert max(orthogonalize_error(x, MIXED, form=form) for form in FORMS) < 1e-3


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), cols=st.integers(1, 40), count=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_any_shape(rows: int, cols: int, count: int, seed: int) -> None:
    assert_right(gaussian(count, rows, cols, seed=seed), polar_express(), ("auto", *FORMS))


@pytest.mark.parametrize(("threads", "one_by_one"), [(1, False), (2, True)])
@by_form
@pytest.mark.parametrize(
    "shape", [(1, 7), (7, 1), (8, 8), (16, 64), (33, 17), (64, 64), (65, 129), (390, 400)], ids=str
)
def test_batch_equals_loop_bit_for_bit(shape: tuple[int, int], form: str, threads: int, one_by_one: bool) -> None:
    torch.set_num_threads(threads)  # a fixture puts it back
    x, scheme, products = gaussian(3, *shape), polar_express(), BlockedProducts(one_by_one=one_by_one)
    loop = torch.stack([orthogonalize(matrix, scheme, form=form, products=products) for matrix in x])
    assert torch.equal(orthogonalize(x, scheme, form=form, products=products), loop)


# Edges


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *SHORT], ids=str)
@pytest.mark.parametrize("compute", [torch.float32, torch.float64, *SHORT], ids=str)
@by_form
def test_zeros_stay_zeros_in_any_dtype(form: str, compute: torch.dtype, dtype: torch.dtype) -> None:
    """The smallest normal float64 is 0 in float32: a norm must not be clamped to it there."""
    x = torch.zeros(2, 4, 6, dtype=dtype)
    x[1, 0, 0] = 2.0
    result = orthogonalize(x, polar_express(), form=form, dtype=compute)
    assert torch.equal(result[0], x[0])
    bound = orthogonalize_error(x[1], polar_express(), form=form, dtype=compute) + unit(dtype)
    assert float(result[1, 0, 0]) == pytest.approx(polar_express()(1.0), rel=0, abs=bound)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4), (2, 0, 4), (2, 4, 0)], ids=str)
def test_empty_stays_empty(shape: tuple[int, ...]) -> None:
    out = torch.empty(shape)
    assert orthogonalize(torch.empty(shape), polar_express()).shape == shape
    assert orthogonalize(torch.empty(shape), polar_express(), out=out) is out


@by_form
@pytest.mark.parametrize("shape", [(6, 10), (2, 9, 7)], ids=str)
def test_a_power_of_two_changes_no_bit(shape: tuple[int, ...], form: str) -> None:
    x = gaussian(*shape)
    result = orthogonalize(x, polar_express(), form=form)
    for exponent in (-100, -30, 1, 30, 100):
        assert torch.equal(orthogonalize(x * 2.0**exponent, polar_express(), form=form), result)
    assert torch.equal(orthogonalize(-x, polar_express(), form=form), -result)


@pytest.mark.parametrize("scale", [1e-42, 1e-44])
def test_the_last_subnormals_stay_finite_in_float16(scale: float) -> None:
    # Divided by the smallest normal float32 they are still too small for float16's range: the result shrinks, no more.
    x, scheme = gaussian(6, 10) * scale, polar_express()
    for form in FORMS:
        result = orthogonalize(x, scheme, form=form, dtype=torch.float16)
        assert 0 < float(torch.linalg.matrix_norm(result, 2)) < 1.05 * highest(scheme.steps)


def test_long_rows_do_not_overflow_in_float16() -> None:
    # The sum of 70,000 squares of the largest entry is more than float16 can hold.
    x, scheme = torch.ones(1, 70_000), polar_express()
    for form in FORMS:
        result = orthogonalize(x, scheme, form=form, dtype=torch.float16)
        # All entries are alike and are rounded alike, as a single one is. The sum of squares moves 1 by half its own
        # error.
        moved = [scheme(1 + sign * sum_error(70_000, torch.float32) / 2) for sign in (-1, 1)]
        bound = orthogonalize_error(x[:, :1], scheme, form=form, dtype=torch.float16)
        bound += max(abs(value - scheme(1.0)) for value in moved)
        wanted = scheme(1.0) / math.sqrt(70_000)
        torch.testing.assert_close(result, torch.full_like(x, wanted), rtol=bound / scheme(1.0), atol=0)


@by_form
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_stay_visible_and_in_their_matrix(poison: float, form: str) -> None:
    x = gaussian(3, 6, 10)
    clean = orthogonalize(x, polar_express(), form=form)
    x[1, 2, 3] = poison
    result = orthogonalize(x, polar_express(), form=form)
    assert not result[1].isfinite().any()
    assert torch.equal(result[[0, 2]], clean[[0, 2]])


# Memory


@by_form
@pytest.mark.parametrize("shape", [(6, 10), (3, 6, 10), (2, 10, 6)], ids=str)
def test_transposed_input_gives_transposed_output(shape: tuple[int, ...], form: str) -> None:
    x = gaussian(*shape)
    assert torch.equal(orthogonalize(x.mT, polar_express(), form=form), orthogonalize(x, polar_express(), form=form).mT)


def strided(shape: tuple[int, ...], how: str) -> Tensor:
    """A tensor of ``shape`` with unusual strides, amid sevens."""
    if how == "columns":
        return torch.zeros(*shape[:-2], shape[-1], shape[-2]).mT
    if how == "slices":
        return torch.full((*shape[:-1], 2 * shape[-1]), 7.0)[..., ::2]
    if how == "window":
        return torch.full((*shape[:-2], shape[-2] + 3, shape[-1] + 5), 7.0)[..., 1:-2, 2:-3]
    return torch.zeros(shape)


@by_form
@pytest.mark.parametrize("of_out", ["plain", "columns", "slices", "window"])
@pytest.mark.parametrize("of_x", ["plain", "columns", "slices", "window"])
@pytest.mark.parametrize("shape", [(6, 10), (2, 10, 6)], ids=str)
def test_any_strides(shape: tuple[int, ...], of_x: str, of_out: str, form: str) -> None:
    values, scheme = gaussian(*shape), polar_express()
    x, out = strided(shape, of_x).copy_(values), strided(shape, of_out)
    memory = out if out._base is None else out._base
    around = int((memory == 7).sum()) - int((out == 7).sum())
    assert orthogonalize(x, scheme, form=form, out=out) is out
    assert int((memory == 7).sum()) == around, "memory beside the output is left alone"
    assert torch.equal(x, values)
    bound = 2 * orthogonalize_error(values, scheme, form=form)
    torch.testing.assert_close(out, orthogonalize(values, scheme, form=form), rtol=0, atol=bound)
    torch.testing.assert_close(orthogonalize(x, scheme, form=form), out, rtol=0, atol=bound)
    assert orthogonalize(x, scheme, form=form, out=x) is x
    torch.testing.assert_close(x, out, rtol=0, atol=bound)


@pytest.mark.parametrize("steps", [4, 5])
@by_form
@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 8, 8)], ids=str)
def test_in_place_equals_out_of_place(shape: tuple[int, ...], form: str, steps: int) -> None:
    x, scheme = gaussian(*shape), polar_express(steps=steps)
    result = orthogonalize(x, scheme, form=form)
    assert torch.equal(orthogonalize(x, scheme, form=form, out=torch.full_like(x, math.nan)), result)
    assert orthogonalize(x, scheme, form=form, out=x) is x
    assert torch.equal(x, result)


def allocations(function: Any) -> list[int]:
    """Sizes of all allocations, but for the numbers that torch wraps into tensors of one element."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        function()
    return [event.self_cpu_memory_usage for event in trace.events() if event.self_cpu_memory_usage > 16]


@pytest.mark.parametrize("scheme", [polar_express(), zolotarev(), halley(), hybrid()], ids=lambda scheme: scheme.name)
@by_form
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 8, 20), torch.float32), ((3, 20, 8), torch.float64), ((1, 386, 390), torch.float32)],
    ids=str,
)
def test_a_repeated_call_allocates_nothing(
    shape: tuple[int, ...], form: str, scheme: Scheme, dtype: torch.dtype
) -> None:
    x, workspace = gaussian(*shape, dtype=dtype), Workspace()
    out = torch.empty_like(x)

    def call(target: Tensor) -> None:
        orthogonalize(x, scheme, form=form, out=target, workspace=workspace)

    assert allocations(lambda: call(out))
    held = workspace.bytes()
    assert allocations(lambda: call(out)) == []
    assert allocations(lambda: call(x)) == []
    assert workspace.bytes() == held


@pytest.mark.parametrize("scheme", [polar_express(), zolotarev()], ids=lambda scheme: scheme.name)
@by_form
def test_results_do_not_depend_on_what_the_workspace_held(scheme: Scheme, form: str) -> None:
    workspace = Workspace()
    for shape in ((12, 30), (3, 40, 8), (1, 5), (12, 30), (2, 9, 9), (2, 130, 64), (3, 40, 8), (260, 260)):
        x = gaussian(*shape)
        for flat in workspace._flat.values():
            flat.fill_(math.nan)
        assert torch.equal(
            orthogonalize(x, scheme, form=form, workspace=workspace), orthogonalize(x, scheme, form=form)
        )


# Precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *SHORT])
@pytest.mark.parametrize("compute", [torch.float32, torch.float64, *SHORT])
def test_result_has_the_dtype_of_the_input(dtype: torch.dtype, compute: torch.dtype) -> None:
    x = with_spectrum(torch.linspace(1, 0.5, 8).double(), 8, 20, dtype=dtype)
    for form in FORMS:
        result = orthogonalize(x, keller(), form=form, dtype=compute)
        assert result.dtype == dtype
        wanted = expected(x, keller().steps)
        bound = orthogonalize_error(x, keller(), form=form, dtype=compute) + unit(dtype) * float(wanted.norm())
        assert spectral_distance(result, wanted) < bound


def test_an_output_may_have_another_dtype() -> None:
    x = gaussian(6, 10)
    out = torch.empty(6, 10, dtype=torch.bfloat16)
    assert orthogonalize(x, keller(), out=out) is out
    assert torch.equal(out, orthogonalize(x, keller()).bfloat16())


def test_compute_dtype_follows_the_device() -> None:
    cpu, cuda, other = torch.device("cpu"), torch.device("cuda"), torch.device("mps")
    for dtype in (torch.float32, *SHORT):
        assert default_compute_dtype(cpu, dtype) == default_compute_dtype(other, dtype) == torch.float32
        assert default_compute_dtype(cuda, dtype) == torch.float16
    assert default_compute_dtype(cuda, torch.float64) == default_compute_dtype(cpu, torch.float64) == torch.float64
    x = gaussian(6, 10).bfloat16()
    assert torch.equal(orthogonalize(x, polar_express()), orthogonalize(x.float(), polar_express()).bfloat16())


@by_form
@pytest.mark.parametrize("dtype", [torch.float32, *SHORT])
def test_cubic_steps(dtype: torch.dtype, form: str) -> None:
    """Newton and Schulz's own polynomial, without a fifth power."""
    x, scheme = gaussian(90, 200), Scheme("cubic", (Quintic(1.5, -0.5, 0.0),) * 2, "Newton–Schulz")
    wanted = orthogonalize(x, scheme, dtype=torch.float64)
    result = orthogonalize(x, scheme, form=form, dtype=dtype, products=BlockedProducts())
    assert spectral_distance(result, wanted) < orthogonalize_error(x, scheme, form=form, dtype=dtype)


IDENTITY = Scheme("nothing", (Quintic(1.0, 0.0, 0.0),), "a step that changes nothing")


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("shape", [(90, 200), (200, 90), (2, 90, 200)], ids=str)
@pytest.mark.parametrize("dtype", SHORT)
def test_the_matrix_is_rounded_once(dtype: torch.dtype, shape: tuple[int, ...], in_place: bool) -> None:
    """A step that changes nothing leaves X divided by its norm: no entry is further off than one rounding."""
    x = gaussian(*shape)
    out = x.clone() if in_place else torch.empty_like(x)
    result = orthogonalize(out if in_place else x, IDENTITY, form="standard", dtype=dtype, out=out)
    factor = (result / x).flatten(-2).median(dim=-1).values[..., None, None]
    normal = result.abs() > torch.finfo(dtype).tiny
    off = float((result / (factor * x) - 1)[normal].abs().max())
    # Of some 10⁴ roundings the largest is next to the unit itself; a second one would make it next to two units.
    assert 0.8 * unit(dtype) < off < 1.15 * unit(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *SHORT])
@by_form
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_no_overshoot_on_adversarial_spectra(scheme: Scheme, form: str, dtype: torch.dtype) -> None:
    for kind in SPECTRA:
        for shape in ((32, 32), (64, 160)):
            result = orthogonalize(of_kind(kind, *shape), scheme, form=form, dtype=dtype)
            assert largest_singular_value(result) < 1.05 * highest(scheme.steps), (kind, shape)


# Callables and bad input


def test_a_callable_gets_a_batch_and_gives_the_result() -> None:
    seen: list[tuple[int, ...]] = []

    def polar(batch: Tensor) -> Tensor:
        seen.append(tuple(batch.shape))
        u, _, vh = torch.linalg.svd(batch, full_matrices=False)
        return u @ vh

    x = gaussian(10, 6)
    wanted = polar(x.unsqueeze(0))[0]
    seen.clear()
    assert torch.equal(orthogonalize(x, polar), wanted)
    assert orthogonalize(x, polar, out=x) is x
    assert torch.equal(x, wanted)
    assert orthogonalize(gaussian(2, 4, 8), polar).shape == (2, 4, 8)
    assert seen == [(1, 10, 6), (1, 10, 6), (2, 4, 8)]


def test_a_callable_gets_misaligned_matrices_one_by_one() -> None:
    """4 × 5 float32 matrices fill 80 bytes: only the first of a dense batch begins at a multiple of 64."""
    addresses: list[int] = []

    def noted(batch: Tensor) -> Tensor:
        assert batch.shape == (1, 4, 5)
        assert batch.is_contiguous()
        addresses.append(batch.data_ptr())
        return batch.mul_(2)  # it may return its own input

    x = gaussian(3, 4, 5)
    assert torch.equal(orthogonalize(x, noted), 2 * x)
    assert [address % 64 for address in addresses] == [0, 0, 0]
    assert orthogonalize(torch.zeros(0, 4, 5), noted).shape == (0, 4, 5)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        *(
            (torch.zeros(shape), {}, r"takes \(rows, cols\) or \(batch, rows, cols\), got")
            for shape in ((), (5,), (1, 2, 3, 4))
        ),
        *((torch.zeros(4, 6), {"out": torch.zeros(shape)}, "out has") for shape in ((6, 4), (4, 7), (1, 4, 6), (24,))),
        *(
            (torch.ones(4, 6, dtype=dtype), {}, "floating point")
            for dtype in (torch.int64, torch.bool, torch.complex64)
        ),
        (torch.zeros(4, 6), {"form": "fast"}, r"form='fast' is unknown; write one of \('auto', 'standard', 'gram'\)"),
        (torch.zeros(4, 6), {"scheme": "kelle"}, "scheme='kelle' is unknown"),
        *(
            (torch.zeros(4, 6), {"scheme": scheme}, "takes a scheme, its name or a callable, got a")
            for scheme in (3, None, {})
        ),
        (torch.zeros(2, 4, 5), {"scheme": lambda batch: batch[:, :1]}, "it must keep the shape"),
        (torch.zeros(2, 4, 5), {"scheme": lambda batch: None}, "made a NoneType of .*it must keep the shape"),
    ],
)
def test_refusals(x: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        orthogonalize(x, **{"scheme": keller(), **options})


def test_a_parameter_and_a_name_may_be_passed_as_they_are() -> None:
    weight = torch.nn.Parameter(gaussian(4, 6))
    result = orthogonalize(weight, "keller")
    assert not result.requires_grad
    assert torch.equal(result, orthogonalize(weight.detach(), keller()))
