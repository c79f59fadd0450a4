"""The Triton symmetric product, run in Triton's interpreter, against float64.

Triton chooses between its compiler and its interpreter while it is imported, for the whole process. So the
kernel runs in a process of its own, started from this file with ``TRITON_INTERPRET=1`` and kept for all tests
here; the tests send it tensors. The rest of the test run may import Triton in any way and order.

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

import importlib
import io
import os
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import IO, Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshmuon.ortho.kernels.tilings import CANDIDATES

triton = pytest.importorskip("triton", reason="Triton is not installed: there is no kernel to test")
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]  # noqa: E402

ANSWER_WITHIN = 55.0  # seconds
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
UNIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
SUBNORMAL = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}


class Tiling(NamedTuple):
    tile: int
    depth: int
    strip: int


class Launch(NamedTuple):
    memory: Tensor  # everything that `out` is a view of
    out: Tensor
    grids: list[tuple[int, ...]]
    options: dict[str, Any]


# ---------------------------------------------------------------------------------- the interpreter's process


def _send(stream: IO[bytes], message: object) -> None:
    # torch.save keeps strides, offsets and which tensors share memory.
    buffer = io.BytesIO()
    torch.save(message, buffer)
    stream.write(struct.pack("<q", buffer.tell()) + buffer.getvalue())
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError
    return torch.load(io.BytesIO(stream.read(struct.unpack("<q", header)[0])), weights_only=False)


class Interpreter:
    """Calls the methods of a `Server` in a process that imported Triton with TRITON_INTERPRET=1."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, method: str, *arguments: object) -> Any:
        if self.process.poll() is not None:
            self.start()  # a kernel that runs out of its memory takes its process along, but not other tests
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        watchdog = threading.Timer(ANSWER_WITHIN, self.process.kill)
        watchdog.start()
        try:
            _send(self.process.stdin, (method, arguments))
            error, answer = _receive(self.process.stdout)
        except (EOFError, BrokenPipeError) as end:
            raise RuntimeError(f"the interpreter's process ended with code {self.process.wait()}") from end
        finally:
            watchdog.cancel()
        if error is not None:
            raise error
        return answer

    def product(self, *tensors: Tensor, out: Tensor, tiling: Tiling | None = None, **options: Any) -> Launch:
        memory = out if out._base is None else out._base
        # Plain tuples only: the other process knows this file's classes by another module name.
        return Launch(*self.ask("product", tensors, memory, out, tiling and tuple(tiling), options))

    def close(self) -> None:
        self.process.communicate()  # closes its input, which is its sign to end


class Server:
    """The other end of an `Interpreter`."""

    def __init__(self) -> None:
        self.kernel, self.tiling = kernels._symmetric_kernel, kernels._tiling
        self.grids: list[tuple[int, ...]] = []
        self.options: dict[str, Any] = {}
        kernels._symmetric_kernel = self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        # Stands in for the kernel, to note how it is launched.
        def launch(*arguments: Any, **options: Any) -> None:
            self.grids.append(grid)
            self.options = options
            self.kernel[grid](*arguments, **options)

        return launch

    def product(self, tensors: Any, memory: Tensor, out: Tensor, tiling: Any, options: Any) -> tuple[Any, ...]:
        self.grids, self.options = [], {}
        chosen = None if tiling is None else kernels.Tiling(*tiling, 4, 2)
        kernels._tiling = self.tiling if chosen is None else lambda *_: chosen
        assert kernels.symmetric_product(*tensors, out=out, **options) is out
        return memory, out, self.grids, self.options

    def positions(self, indices: Tensor, tiles: int, strip: int, error: float) -> tuple[Tensor, Tensor]:
        from triton.runtime.interpreter import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
            interpreter_builder,
        )

        size = 1 << (len(indices) - 1).bit_length()
        padded = torch.nn.functional.pad(indices, (0, size - len(indices)))
        rows, columns = torch.full_like(padded, -1), torch.full_like(padded, -1)
        exact_root = interpreter_builder.create_sqrt

        def root(argument: Any) -> Any:
            handle = exact_root(argument)
            handle.data = (handle.data * (1 + error)).astype(handle.data.dtype)
            return handle

        interpreter_builder.create_sqrt = root
        try:
            _positions_kernel[(1,)](padded, tiles, rows, columns, strip, size)
        finally:
            del interpreter_builder.create_sqrt
        return rows[: len(indices)], columns[: len(indices)]

    def by_tiling(self, x: Tensor, tilings: list[tuple[int, ...]]) -> list[Tensor]:
        """x @ x.mT with each tiling, where a slice of the inner dim is summed in order, as numpy's own product may not do."""
        from triton.runtime.interpreter import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
            TensorHandle,
            interpreter_builder,
        )

        def dot(a: Any, b: Any, d: Any, *_: object) -> Any:
            total = 0.0 * d.data
            for k in range(a.data.shape[-1]):
                total = total + a.data[:, k : k + 1].astype(d.data.dtype) * b.data[k : k + 1].astype(d.data.dtype)
            return TensorHandle(total + d.data, d.dtype.scalar)

        interpreter_builder.create_dot = dot
        try:
            outs = [torch.empty(x.shape[0], x.shape[1], x.shape[1]) for _ in tilings]
            for out, tiling in zip(outs, tilings, strict=True):
                chosen = kernels.Tiling(*tiling)
                kernels._tiling = lambda *_, chosen=chosen: chosen
                kernels.symmetric_product(x, x, out=out)
        finally:
            del interpreter_builder.create_dot
        return outs

    def precision(self, setting: str, value: object, restored: object) -> str:
        setattr(torch.backends.cuda.matmul, setting, value)
        try:
            one, out = torch.ones(1, 1, 1), torch.empty(1, 1, 1)
            self.product((one, one), out, out, (16, 16, 1), {})
        finally:
            setattr(torch.backends.cuda.matmul, setting, restored)
        return str(self.options["precision"])

    def far_apart(self, dim: int, depth: int) -> list[Tensor]:
        # Index 2 along `dim` is 2**31 elements away. Only the pages in use are ever backed by memory.
        memory = torch.empty(2**31 + 4096, dtype=torch.float16)
        strides = [9, 3, 1]
        strides[dim] = 2**30
        views = [memory.as_strided((3, 3, 3), strides, storage_offset=1000 * i) for i in range(4)]
        for seed, view in enumerate(views):
            view.copy_(randn(3, 3, 3, dtype=torch.float16, seed=seed))
        a, b, addend, out = views
        self.product((a, b), out, out, (2, depth, 1), {"addend": addend, "beta": 1.0})
        return [view.clone() for view in views]

    def run(self) -> None:
        while True:
            try:
                method, arguments = _receive(sys.stdin.buffer)
            except EOFError:
                return
            reply: tuple[Exception | None, object]
            try:
                reply = None, getattr(self, method)(*arguments)
            except (TypeError, ValueError) as error:
                reply = error, None
            except Exception:
                reply = RuntimeError(traceback.format_exc()), None
            _send(sys.stdout.buffer, reply)


kernels: Any  # meshmuon.ortho.kernels.triton_symmetric, in the other process only


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _positions_kernel(
    indices: tl.tensor,
    tiles: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    strip: tl.constexpr,
    size: tl.constexpr,
) -> None:
    at = tl.arange(0, size)
    row, column = kernels._tile_position(tl.load(indices + at), tiles, strip)
    tl.store(rows + at, row)
    tl.store(columns + at, column)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    process = Interpreter()
    yield process
    process.close()


# ------------------------------------------------------------------------------------------------- the oracle


def mirror_upper(full: Tensor) -> Tensor:
    return full.triu() + full.triu(1).mT


def check(launch: Launch, a: Tensor, b: Tensor, addend: Tensor | None, alpha: float, beta: float) -> None:
    """`launch.out` is the mirrored upper triangle of the exact result, within the tolerance derived above."""
    left, right = a.double(), b.double()
    exact = alpha * left @ right.mT
    size = abs(alpha) * left.abs() @ right.abs().mT
    if addend is not None and beta != 0:
        exact = exact + beta * addend.double()
        size = size + abs(beta) * addend.double().abs()
    exact, size = mirror_upper(exact), mirror_upper(size)
    error = (a.shape[2] + 6) * 2.0**-24 * size
    dtype = launch.out.dtype
    tolerance = error + UNIT[dtype] * (exact.abs() + error) + SUBNORMAL[dtype]
    wrong = ~((launch.out.double() - exact).abs() <= tolerance)  # NaN counts as wrong
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {wrong.nonzero()[0]}"
    bits = launch.out.contiguous().view(torch.int32 if dtype == torch.float32 else torch.int16)
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
    tiling = Tiling(
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
        beta=0.0 if addend == "none" else draw(factors),
        seed=draw(st.integers(0, 2**31)),
        layouts={name: draw(layouts(expanded=name != "out")) for name in ("a", "b", "addend", "out")},
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Not shrunk: on a busy machine that takes minutes, and a case is small and printed in full.
@settings(max_examples=25, deadline=None, database=None, phases=[Phase.generate])
@given(data=st.data())
def test_any_shape_layout_and_factor(interpreter: Interpreter, dtype: torch.dtype, data: Any) -> None:
    # a and b are unrelated, so the exact product is not symmetric. This pins down that the upper triangle is
    # kept, and shows a swap of a and b, or a diagonal tile that was not made symmetric.
    case: Case = data.draw(cases(dtype))
    batch, n, _ = case.shape
    square = (batch, n, n)
    a = case.layouts["a"].view(case.shape, dtype, case.seed)
    b = case.layouts["b"].view(case.shape, dtype, case.seed + 1)
    own = case.layouts["addend"].view(square, dtype, case.seed + 2)
    addend = {"none": None, "its own": own, "a": a}[case.addend]
    out = case.layouts["out"].view(square, case.out_dtype, None)

    options = {"addend": addend, "alpha": case.alpha, "beta": case.beta}
    launch = interpreter.product(a, b, out=out, tiling=case.tiling, **options)

    check(launch, a, b, addend, case.alpha, case.beta)
    assert launch.grids == programs(batch, n, case.tiling.tile)
    launch.out.fill_(torch.nan)
    assert launch.memory.isnan().all(), "memory around `out` was written"


# ---------------------------------------------------------------------------------------- the products in use


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gram_and_its_polynomial_equal_torch(interpreter: Interpreter, dtype: torch.dtype) -> None:
    x = randn(2, 45, 83, dtype=dtype) / 83**0.5
    gram = interpreter.product(x, x, out=torch.empty(2, 45, 45, dtype=dtype), tiling=Tiling(16, 32, 2))
    check(gram, x, x, None, 1.0, 0.0)

    a = gram.out  # exactly symmetric, so the polynomial is too, and its mirrored triangle is all of it
    alpha, beta = 2.0315, -4.775
    polynomial = interpreter.product(a, a, out=torch.empty_like(a), tiling=Tiling(16, 32, 2), addend=a, alpha=alpha, beta=beta)
    check(polynomial, a, a, a, alpha, beta)
    full = torch.baddbmm(a.double(), a.double(), a.double(), alpha=alpha, beta=beta)
    size = alpha * a.double().abs() @ a.double().abs() - beta * a.double().abs()
    assert bool(((mirror_upper(full) - full).abs() <= 2 * (45 + 2) * 2.0**-53 * size).all())


def test_commuting_factors(interpreter: Interpreter) -> None:
    # Polynomials of one symmetric matrix commute until they are rounded: each of the two products p @ q and
    # q @ p then moves by at most u * |p| @ |q| for either factor's rounding.
    x = randn(1, 40, 40, dtype=torch.float64)
    s = (x + x.mT) / 40
    p, q = (s @ s - 3 * s).float(), (2 * s @ s @ s + s).float()
    launch = interpreter.product(p, q, out=torch.empty(1, 40, 40), tiling=Tiling(16, 16, 2))
    check(launch, p, q, None, 1.0, 0.0)
    p, q = p.double(), q.double()
    tolerance = (40 + 8) * 2.0**-24 * (p.abs() @ q.abs() + q.abs() @ p.abs())
    assert ((launch.out.double() - p @ q).abs() <= tolerance).all()


@pytest.mark.parametrize(("n", "tile"), [(70, 64), (520, 128)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tiles_that_are_shipped(interpreter: Interpreter, dtype: torch.dtype, n: int, tile: int) -> None:
    x = randn(1, n, 90, dtype=dtype)
    launch = interpreter.product(x, x, out=torch.empty(1, n, n, dtype=dtype))
    check(launch, x, x, None, 1.0, 0.0)
    assert launch.grids == programs(1, n, tile)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_candidate_gives_the_same_bits(interpreter: Interpreter, dtype: torch.dtype) -> None:
    # Ranks measure for themselves and may choose different candidates.
    x = randn(1, 130, 150, dtype=dtype)
    candidates = CANDIDATES[dtype]
    other_depth = replace(candidates[-1], depth=candidates[-1].depth // 2)
    *outs, other = interpreter.ask("by_tiling", x, [astuple(tiling) for tiling in (*candidates, other_depth)])
    assert len(outs) == len(candidates)
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert not torch.equal(other, outs[0]), "the depth changes bits, or this test could not fail"


# ------------------------------------------------------------------------------------------------------ edges


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (0, 0, 0)])
def test_nothing_to_do_launches_nothing(interpreter: Interpreter, shape: tuple[int, int, int]) -> None:
    x, out = torch.ones(shape), torch.empty(shape[0], shape[1], shape[1])
    assert interpreter.product(x, x, out=out).grids == []


def test_no_inner_dimension_leaves_the_addend(interpreter: Interpreter) -> None:
    x, addend = torch.ones(2, 20, 0), randn(2, 20, 20, dtype=torch.float32)
    out, tiling = torch.full((2, 20, 20), torch.nan), Tiling(16, 16, 1)
    assert torch.equal(interpreter.product(x, x, out=out, tiling=tiling).out, torch.zeros(2, 20, 20))
    scaled = interpreter.product(x, x, out=out, tiling=tiling, addend=addend, beta=0.5)
    assert torch.equal(scaled.out, mirror_upper(0.5 * addend))


def test_beta_zero_does_not_read_the_addend(interpreter: Interpreter) -> None:
    x, out = randn(1, 20, 7, dtype=torch.float32), torch.empty(1, 20, 20)
    launch = interpreter.product(x, x, out=out, tiling=Tiling(16, 16, 1), addend=out * torch.nan, beta=0.0)
    check(launch, x, x, None, 1.0, 0.0)


def test_beta_without_an_addend_has_no_effect(interpreter: Interpreter) -> None:
    x = randn(1, 20, 7, dtype=torch.float32)
    launch = interpreter.product(x, x, out=torch.empty(1, 20, 20), tiling=Tiling(16, 16, 1), beta=1.0)
    check(launch, x, x, None, 1.0, 0.0)


def test_nan_spreads_as_in_torch(interpreter: Interpreter) -> None:
    x = randn(1, 20, 7, dtype=torch.float32)
    x[0, 18, 3] = torch.nan
    launch = interpreter.product(x, x, out=torch.empty(1, 20, 20), tiling=Tiling(16, 16, 1))
    assert torch.equal(launch.out.isnan(), (x @ x.mT).isnan())


@pytest.mark.parametrize("depth", [2, 4])  # the far element is in the second slice, or in the first
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_elements_more_than_two_to_the_31_apart(interpreter: Interpreter, dim: int, depth: int) -> None:
    try:
        a, b, addend, out = interpreter.ask("far_apart", dim, depth)
    except RuntimeError as error:
        if "allocate" in str(error):
            pytest.skip("4 GiB of address space are not to be had")
        raise
    check(Launch(out, out, [], {}), a, b, addend, 1.0, 1.0)


def test_tf32_only_if_torch_allows_it(interpreter: Interpreter) -> None:
    # Both ways to say it. Reading the older one after the newer one was set is an error in torch.
    assert interpreter.ask("precision", "allow_tf32", False, False) == "ieee"
    assert interpreter.ask("precision", "allow_tf32", True, False) == "tf32"
    assert interpreter.ask("precision", "fp32_precision", "tf32", "none") == "tf32"
    assert interpreter.ask("precision", "fp32_precision", "ieee", "none") == "ieee"


# ------------------------------------------------------------------------------ which tile a program computes


# A GPU's square root may be off by 2**-23 (PTX's sqrt.approx), the interpreter's is exact.
root_errors = pytest.mark.parametrize("error", [0.0, 2.0**-22, -(2.0**-22)], ids=["exact", "high", "low"])


def all_positions(interpreter: Interpreter, tiles: int, strip: int, error: float) -> list[tuple[int, int]]:
    indices = torch.arange(tiles * (tiles + 1) // 2, dtype=torch.int32)
    rows, columns = interpreter.ask("positions", indices, tiles, strip, error)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


@root_errors
@pytest.mark.parametrize("strip", [1, 2, 3, 8])
def test_programs_cover_every_upper_tile_once(interpreter: Interpreter, strip: int, error: float) -> None:
    for tiles in (1, 2, 3, 7, 8, 9, 16, 65):
        expected = [(row, column) for row in range(tiles) for column in range(row, tiles)]
        assert sorted(all_positions(interpreter, tiles, strip, error)) == expected


@root_errors
def test_programs_find_their_tile_in_huge_matrices(interpreter: Interpreter, error: float) -> None:
    # Next to triangular numbers of this size a root in fp32 lands on the wrong side.
    tiles = 30_000
    column = torch.arange(tiles - 2000, tiles, dtype=torch.int32)
    top = column * (column + 1) // 2
    for index, row in ((top, torch.zeros_like(column)), (top + column, column)):
        rows, columns = interpreter.ask("positions", index, tiles, 1, error)
        assert torch.equal(rows, row)
        assert torch.equal(columns, column)


def test_neighbouring_programs_share_a_strip_of_columns(interpreter: Interpreter) -> None:
    positions = all_positions(interpreter, tiles=5, strip=2, error=0.0)
    first, second, last = positions[:3], positions[3:10], positions[10:]
    assert first == [(0, 0), (0, 1), (1, 1)]
    assert second == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3)]
    assert last == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


if __name__ == "__main__":
    kernels = importlib.import_module("meshmuon.ortho.kernels.triton_symmetric")
    Server().run()
