"""The Triton symmetric product, run in Triton's interpreter, against float64. Run by ``test_triton_kernels``.

Tolerance, per element, for ``out = beta * addend + alpha * a @ b.mT`` over k terms. With u = 2**-24, fp32
sums of fp32 products in any order are off by at most about k * u * (|a| @ |b|.mT); rounding alpha and beta to
fp32, the two multiplications and the addition cost at most 5u more, all relative to

    size = |alpha| * |a| @ |b|.mT + |beta| * |addend|

so `error = (k + 6) * u * size` covers the sum with its second-order terms for k up to thousands. Rounding to
the result's dtype then costs `unit * (|exact| + error)`, with unit = 2**-24 for fp32 and 2**-11 for fp16
(nearest), but 2**-7 for bf16, because the interpreter truncates to bf16 (a GPU rounds: 2**-8). Results below
the dtype's normal range add at most one smallest subnormal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
    interpreter_builder,
)

from meshmuon.ortho.kernels import triton_symmetric
from meshmuon.ortho.kernels.tilings import Tiling

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
UNIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
SUBNORMAL = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}


def tiles_of(tile: int, depth: int, strip: int) -> Tiling:
    return Tiling(tile, depth, strip, warps=4, stages=2)


@dataclass
class Kernel:
    """Stands in for the kernel, to note how it is launched, with tiles of the test's choice."""

    monkeypatch: pytest.MonkeyPatch
    kernel: Any = triton_symmetric._symmetric_kernel
    grids: list[tuple[int, ...]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.grids.append(grid)
            self.options = options
            self.kernel[grid](*arguments, **options)

        return launch

    def product(self, *tensors: Tensor, out: Tensor, tiling: Tiling | None = None, **options: Any) -> Tensor:
        self.grids.clear()
        with self.monkeypatch.context() as patch:
            patch.setattr(triton_symmetric, "_symmetric_kernel", self)
            if tiling is not None:
                patch.setattr(triton_symmetric, "default_tiling", lambda dtype, n: tiling)
            assert triton_symmetric.symmetric_product(*tensors, out=out, **options) is out
        return out


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _positions_kernel(
    indices: tl.tensor, tiles: tl.tensor, rows: tl.tensor, columns: tl.tensor, strip: tl.constexpr, size: tl.constexpr
) -> None:
    at = tl.arange(0, size)
    row, column = triton_symmetric._tile_position(tl.load(indices + at), tiles, strip)
    tl.store(rows + at, row)
    tl.store(columns + at, column)


# ------------------------------------------------------------------------------------------------- the oracle


def mirror_upper(full: Tensor) -> Tensor:
    return full.triu() + full.triu(1).mT


def check(out: Tensor, a: Tensor, b: Tensor, addend: Tensor | None, alpha: float, beta: float) -> None:
    """`out` is the mirrored upper triangle of the exact result, within the tolerance derived above."""
    left, right = a.double(), b.double()
    exact = alpha * left @ right.mT
    size = abs(alpha) * left.abs() @ right.abs().mT
    if addend is not None and beta != 0:
        exact = exact + beta * addend.double()
        size = size + abs(beta) * addend.double().abs()
    exact, size = mirror_upper(exact), mirror_upper(size)
    error = (a.shape[2] + 6) * 2.0**-24 * size
    dtype = out.dtype
    tolerance = error + UNIT[dtype] * (exact.abs() + error) + SUBNORMAL[dtype]
    wrong = ~((out.double() - exact).abs() <= tolerance)  # NaN counts as wrong
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {wrong.nonzero()[0]}"
    bits = out.contiguous().view(torch.int32 if dtype == torch.float32 else torch.int16)
    assert torch.equal(bits, bits.mT)


def programs(batch: int, n: int, tile: int) -> list[tuple[int, ...]]:
    tiles = -(-n // tile)
    return [(batch * tiles * (tiles + 1) // 2,)]


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ------------------------------------------------------------------------------------------------- properties


@dataclass(frozen=True)
class Layout:
    """How a (B, r, c) view lies in memory: with its dimensions in `order` from the outermost, and margins."""

    order: tuple[int, ...]
    margins: tuple[int, ...]
    expanded: bool  # one matrix for the whole batch, at stride 0

    def view(self, shape: tuple[int, int, int], dtype: torch.dtype, seed: int | None) -> Tensor:
        """Random values amid NaN, which must not get into a result, or, without a seed, all NaN."""
        sizes = [1 if self.expanded and dim == 0 else size for dim, size in enumerate(shape)]
        memory = torch.full([sizes[i] + 2 * self.margins[i] for i in self.order], torch.nan, dtype=dtype)
        view = memory.permute([self.order.index(dim) for dim in range(3)])
        for dim in range(3):
            view = view.narrow(dim, self.margins[dim], sizes[dim])
        if seed is not None:
            view.copy_(randn(*sizes, dtype=dtype, seed=seed))
        return view.expand(shape)


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int]
    out_dtype: torch.dtype
    tiling: Tiling
    addend: str
    alpha: float
    beta: float
    seed: int
    layouts: dict[str, Layout]


def layouts(*, expanded: bool) -> st.SearchStrategy[Layout]:
    return st.builds(
        Layout,
        order=st.permutations([0, 1, 2]).map(tuple),
        margins=st.tuples(*[st.integers(0, 3)] * 3),
        expanded=st.booleans() if expanded else st.just(False),
    )


factors = st.sampled_from([1.0, -1.0, 0.0, 2.0315]) | st.floats(-2, 2).map(lambda value: round(value, 3))


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype) -> Case:
    n = draw(st.integers(1, 70))
    addend = draw(st.sampled_from(["none", "its own", "a"]))
    tiling = tiles_of(
        # Many small tiles are slow here: the interpreter takes about 20 ms for each.
        tile=draw(st.sampled_from([16, 32] if n > 30 else [4, 16, 32])),
        depth=draw(st.sampled_from([8, 16, 64])),
        strip=draw(st.integers(1, 4)),
    )
    return Case(
        shape=(draw(st.integers(1, 2)), n, n if addend == "a" else draw(st.integers(0, 70))),
        out_dtype=draw(st.sampled_from([dtype, torch.float32])),
        tiling=tiling,
        addend=addend,
        alpha=draw(factors),
        beta=draw(factors),
        seed=draw(st.integers(0, 2**31)),
        layouts={name: draw(layouts(expanded=name != "out")) for name in ("a", "b", "addend", "out")},
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Not shrunk: on a busy machine that takes minutes, and a case is small and printed in full.
@settings(
    max_examples=25, database=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_shape_layout_and_factor(kernel: Kernel, dtype: torch.dtype, data: Any) -> None:
    # a and b are unrelated, so the exact product is not symmetric. This pins down that the upper triangle is
    # kept, and shows a swap of a and b, or a diagonal tile that was not made symmetric.
    case: Case = data.draw(cases(dtype))
    batch, n, _ = case.shape
    square = (batch, n, n)
    a = case.layouts["a"].view(case.shape, dtype, case.seed)
    b = case.layouts["b"].view(case.shape, dtype, case.seed + 1)
    own = case.layouts["addend"].view(square, dtype, case.seed + 2 if case.beta else None)  # not read if beta is 0
    addend = {"none": None, "its own": own, "a": a}[case.addend]
    out = case.layouts["out"].view(square, case.out_dtype, None)

    kernel.product(a, b, out=out, tiling=case.tiling, addend=addend, alpha=case.alpha, beta=case.beta)

    check(out, a, b, addend, case.alpha, case.beta)
    assert kernel.grids == programs(batch, n, case.tiling.tile)
    memory = out if out._base is None else out._base
    out.fill_(torch.nan)
    assert memory.isnan().all(), "memory around `out` was written"


@pytest.mark.parametrize(("n", "tile"), [(70, 64), (520, 128)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tiles_that_are_shipped(kernel: Kernel, dtype: torch.dtype, n: int, tile: int) -> None:
    x = randn(1, n, 90, dtype=dtype)
    check(kernel.product(x, x, out=torch.empty(1, n, n, dtype=dtype)), x, x, None, 1.0, 0.0)
    assert kernel.grids == programs(1, n, tile)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (0, 0, 0)])
def test_nothing_to_do_launches_nothing(kernel: Kernel, shape: tuple[int, int, int]) -> None:
    x = torch.ones(shape)
    kernel.product(x, x, out=torch.empty(shape[0], shape[1], shape[1]))
    assert kernel.grids == []


def test_no_inner_dimension_leaves_the_addend(kernel: Kernel) -> None:
    x, addend = torch.ones(2, 20, 0), randn(2, 20, 20, dtype=torch.float32)
    out, tiling = torch.full((2, 20, 20), torch.nan), tiles_of(16, 16, 1)
    assert torch.equal(kernel.product(x, x, out=out, tiling=tiling), torch.zeros(2, 20, 20))
    assert torch.equal(
        kernel.product(x, x, out=out, tiling=tiling, addend=addend, beta=0.5), mirror_upper(0.5 * addend)
    )


def test_nan_spreads_as_in_torch(kernel: Kernel) -> None:
    x = randn(1, 20, 7, dtype=torch.float32)
    x[0, 18, 3] = torch.nan
    out = kernel.product(x, x, out=torch.empty(1, 20, 20), tiling=tiles_of(16, 16, 1))
    assert torch.equal(out.isnan(), (x @ x.mT).isnan())


@pytest.mark.parametrize("depth", [2, 4])  # the far element is in the second slice, or in the first
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_elements_more_than_two_to_the_31_apart(kernel: Kernel, dim: int, depth: int) -> None:
    try:
        memory = torch.empty(2**31 + 4096, dtype=torch.float16)  # only the pages in use are ever backed by memory
    except RuntimeError:
        pytest.skip("4 GiB of address space are not to be had")
    strides = [9, 3, 1]
    strides[dim] = 2**30  # index 2 is 2**31 elements away
    a, b, addend, out = (memory.as_strided((3, 3, 3), strides, storage_offset=1000 * i) for i in range(4))
    for seed, view in enumerate((a, b, addend)):
        view.copy_(randn(3, 3, 3, dtype=torch.float16, seed=seed))
    kernel.product(a, b, out=out, tiling=tiles_of(2, depth, 1), addend=addend, beta=1.0)
    check(*(view.clone() for view in (out, a, b, addend)), 1.0, 1.0)


@pytest.mark.parametrize(
    ("setting", "value", "restored", "precision"),
    [
        # Both ways to say it. Reading the older one after the newer one was set is an error in torch.
        ("allow_tf32", False, False, "ieee"),
        ("allow_tf32", True, False, "tf32"),
        ("fp32_precision", "tf32", "none", "tf32"),
        ("fp32_precision", "ieee", "none", "ieee"),
    ],
)
def test_tf32_only_if_torch_allows_it(
    kernel: Kernel, setting: str, value: object, restored: object, precision: str
) -> None:
    setattr(torch.backends.cuda.matmul, setting, value)
    try:
        one = torch.ones(1, 1, 1)
        kernel.product(one, one, out=torch.empty(1, 1, 1), tiling=tiles_of(16, 16, 1))
    finally:
        setattr(torch.backends.cuda.matmul, setting, restored)
    assert kernel.options["precision"] == precision


# ------------------------------------------------------------------------------ which tile a program computes


# A GPU's square root may be off by 2**-23 (PTX's sqrt.approx), the interpreter's is exact.
root_errors = pytest.mark.parametrize(
    "root_error", [0.0, 2.0**-22, -(2.0**-22)], ids=["exact", "high", "low"], indirect=True
)


@pytest.fixture
def root_error(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    exact_root = interpreter_builder.create_sqrt

    def root(argument: Any) -> Any:
        handle = exact_root(argument)
        handle.data = (handle.data * (1 + request.param)).astype(handle.data.dtype)
        return handle

    monkeypatch.setattr(interpreter_builder, "create_sqrt", root)


def positions(indices: Tensor, tiles: int, strip: int) -> tuple[Tensor, Tensor]:
    size = 1 << (len(indices) - 1).bit_length()
    padded = torch.nn.functional.pad(indices, (0, size - len(indices)))
    rows, columns = torch.full_like(padded, -1), torch.full_like(padded, -1)
    _positions_kernel[(1,)](padded, tiles, rows, columns, strip, size)
    return rows[: len(indices)], columns[: len(indices)]


def all_positions(tiles: int, strip: int) -> list[tuple[int, int]]:
    rows, columns = positions(torch.arange(tiles * (tiles + 1) // 2, dtype=torch.int32), tiles, strip)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


@root_errors
@pytest.mark.parametrize("strip", [1, 2, 3, 8])
def test_programs_cover_every_upper_tile_once(root_error: None, strip: int) -> None:
    for tiles in (1, 2, 3, 7, 8, 9, 16, 65):
        expected = [(row, column) for row in range(tiles) for column in range(row, tiles)]
        assert sorted(all_positions(tiles, strip)) == expected


@root_errors
def test_programs_find_their_tile_in_huge_matrices(root_error: None) -> None:
    # Next to triangular numbers of this size a root in fp32 lands on the wrong side.
    tiles = 30_000
    column = torch.arange(tiles - 2000, tiles, dtype=torch.int32)
    top = column * (column + 1) // 2
    for index, row in ((top, torch.zeros_like(column)), (top + column, column)):
        rows, columns = positions(index, tiles, 1)
        assert torch.equal(rows, row)
        assert torch.equal(columns, column)


def test_neighbouring_programs_share_a_strip_of_columns() -> None:
    every = all_positions(tiles=5, strip=2)
    first, second, last = every[:3], every[3:10], every[10:]
    assert first == [(0, 0), (0, 1), (1, 1)]
    assert second == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3)]
    assert last == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
