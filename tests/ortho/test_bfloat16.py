"""Products in 16 bits on a CPU: how they are called, the mixed scheme of CPUs with units for bfloat16, and its bits.

What has units and what has none computes the same, only slower: these tests run on both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshmuon import Muon, RoutingWarning
from meshmuon.ortho import (
    AUTO,
    Scheme,
    Workspace,
    aligned_matrices,
    default_compute_dtype,
    expected_flops,
    halley,
    hybrid,
    keller,
    orthogonalize,
    polar_express,
    reserve_scratch,
    scheme_for,
    scratch_bytes,
)
from meshmuon.tools.doctor.numerics import exact_result, rounding_bound
from tests.support.hostile import HostileArithmetic, misplaced
from tests.support.reference import newton_schulz
from tests.support.units import bfloat16_units

from .oracle import SPECTRA, gaussian, of_kind
from .test_orthogonalize import allocations, strided

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SHAPES = ((1, 7), (7, 1), (8, 8), (33, 17), (16, 64), (100, 130), (130, 100), (250, 96), (390, 400))


@pytest.fixture
def units() -> Iterator[None]:
    with bfloat16_units(smallest=1):
        yield


# How products are called.


class ShortProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records products of 16 bits: the operation, and whether its result is transposed in memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if ("mm" in name or "matmul" in name) and isinstance(result, Tensor) and result.dtype.itemsize == 2:
            rows, cols = result.stride()[-2:]
            self.calls.append((name, rows < cols))
        return result


def step(shapes: tuple[tuple[int, ...], ...], **options: Any) -> None:
    params = [nn.Parameter(gaussian(*shape, seed=k)) for k, shape in enumerate(shapes)]
    optimizer = Muon([{"params": params, "use_muon": True, **options}])
    for param in params:
        param.grad = gaussian(*param.shape, seed=7)
    optimizer.step()


@pytest.mark.parametrize("compute", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", ["keller", "polar_express", "auto"])
@pytest.mark.parametrize("with_units", [False, True])
def test_no_product_of_16_bits_is_batched_or_written_into_transposed_memory(
    scheme: Any, compute: torch.dtype, with_units: bool, units: None
) -> None:
    """``bmm`` and ``baddbmm`` with a transposed result are more than 1,000 times slower: a step would take minutes."""
    shapes = ((40, 24), (40, 24), (24, 40), (32, 32), (32, 32), (400, 130))
    with bfloat16_units() if with_units else bfloat16_units(smallest=1 << 30), ShortProducts() as recorded:
        step(shapes, scheme=scheme, compute_dtype=compute)
        for shape in ((40, 24), (3, 40, 24), (3, 24, 40)):
            for how in ("plain", "columns", "window"):
                x = strided(shape, how).copy_(gaussian(*shape)).to(compute)
                orthogonalize(x, scheme, dtype=compute, out=strided(shape, how).to(compute))
    assert len(recorded.calls) > 100
    assert {name for name, _ in recorded.calls} <= {"mm", "addmm"}
    assert not any(transposed for _, transposed in recorded.calls)


# What is computed in what.


def test_the_default_of_a_cpu_with_units_is_bfloat16_where_that_is_faster() -> None:
    for scheme, dtype in (
        (AUTO, BF16),
        (keller(), BF16),
        (polar_express(), BF16),
        (hybrid(), F32),
        (halley(), F32),
        (abs, F32),
    ):
        with bfloat16_units():
            assert default_compute_dtype(CPU, F32, scheme) == dtype  # type: ignore[arg-type]
            assert default_compute_dtype(CPU, F32, scheme, 64) == F32  # type: ignore[arg-type]
            assert default_compute_dtype(CPU, F64, scheme) == F64  # type: ignore[arg-type]
            assert default_compute_dtype(CUDA, F32, scheme) == torch.float16  # type: ignore[arg-type]
        assert default_compute_dtype(CPU, F32, scheme) == F32  # type: ignore[arg-type]


def test_auto_is_halley_with_one_quintic_where_products_are_mixed() -> None:
    with bfloat16_units():
        assert scheme_for(AUTO, 512, 512, BF16) == scheme_for(AUTO, 20, 30, BF16) == halley(quintics=1)
        assert scheme_for(AUTO, 512, 512, BF16, CUDA) == scheme_for(AUTO, 512, 512, torch.float16) == polar_express()
        assert scheme_for(AUTO, 512, 512, F32) == hybrid()
        assert scheme_for(halley(quintics=1), 512, 512, BF16) == polar_express()  # named ones fall back everywhere
        mixed, full = (expected_flops(512, 512, AUTO, "auto", dtype) for dtype in (BF16, F32))
        assert mixed < full  # both in FLOPs of float32, so that plans weigh them against each other
    assert scheme_for(AUTO, 512, 512, BF16) == polar_express()


@pytest.mark.parametrize(
    ("options", "scheme", "compute"),
    [
        ({}, halley(quintics=1), BF16),
        ({"compute_dtype": BF16}, halley(quintics=1), BF16),
        ({"compute_dtype": F32}, AUTO, F32),
        ({"scheme": "keller"}, keller(), BF16),
        ({"scheme": "keller", "compute_dtype": F32}, keller(), F32),
        ({"scheme": "hybrid"}, hybrid(), F32),
        ({"scheme": "hybrid", "compute_dtype": BF16}, polar_express(), BF16),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_a_step_takes_dtype_and_scheme_by_option_and_shape(
    options: dict[str, Any], scheme: Scheme, compute: torch.dtype
) -> None:
    """Without momentum a step from zeros goes along the orthogonalised gradient."""
    for shape, own in (((128, 104), (scheme, compute)), ((64, 200), None)):
        param, grad = nn.Parameter(torch.zeros(shape)), gaussian(*shape)
        plain: Any = {"lr": 0.01, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
        group = {"params": [param], "use_muon": True, **plain, **options}
        falls_back = options == {"scheme": "hybrid", "compute_dtype": BF16}
        with bfloat16_units(), pytest.warns(RoutingWarning, match="too short") if falls_back else nullcontext():
            optimizer = Muon([group])
            param.grad = grad.clone()
            optimizer.step()
            wanted_scheme, wanted_dtype = own or (options.get("scheme", AUTO), options.get("compute_dtype", F32))
            if wanted_scheme == halley(quintics=1):
                wanted_scheme = AUTO
            result = orthogonalize(grad, wanted_scheme, dtype=wanted_dtype)
        direction = param.detach() / param.detach().norm()
        assert torch.allclose(direction, -result / result.norm(), rtol=0, atol=1e-6)


# How exact the mixed scheme is.


def error_of(result: Tensor, count: int) -> float:
    return float((torch.linalg.svdvals(result.double())[:count] - 1).abs().max())


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("shape", [(96, 256), (256, 96), (200, 200)], ids=str)
def test_spectra_end_where_rounding_allows(kind: str, shape: tuple[int, int], units: None) -> None:
    x, scheme = of_kind(kind, *shape), halley(quintics=1)
    difference = orthogonalize(x, AUTO, dtype=BF16).double() - exact_result(x.bfloat16().float(), scheme)
    assert float(difference.norm()) <= rounding_bound(x, scheme, BF16)


@pytest.mark.parametrize("kind", ["log", "spike2", "spike3"])
def test_nowhere_further_from_1_than_keller_in_exact_arithmetic(kind: str, units: None) -> None:
    """And by a wide margin: 0.16 to 0.3 beside 0.53, which bfloat16 makes 0.54 to 0.63."""
    for n in (128, 256):
        x = of_kind(kind, n, n)
        reachable = int((torch.linalg.svdvals(x.double()) >= 0.99e-3 * float(x.double().norm())).sum())
        by_keller = newton_schulz(x.double(), [(3.4445, -4.7750, 2.0315)] * 5, 1e-7)
        assert error_of(orthogonalize(x, AUTO, dtype=BF16), reachable) < 0.75 * error_of(by_keller, reachable)


def test_a_spike_on_an_axis_keeps_the_directions_beside_it(units: None) -> None:
    """They must not see the rounding of the factor's one large entry."""
    n = 128
    x = 1e-3 * torch.eye(n)
    x[5, 5] = 1.0
    assert error_of(orthogonalize(x, AUTO, dtype=BF16), n) < 0.25


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-20, 2.0**100])
def test_zeros_scales_and_what_is_not_finite(scale: float, units: None) -> None:
    x = gaussian(40, 50)
    assert torch.equal(orthogonalize(x * scale, AUTO, dtype=BF16), orthogonalize(x, AUTO, dtype=BF16))
    assert torch.equal(orthogonalize(torch.zeros(40, 50), AUTO, dtype=BF16), torch.zeros(40, 50))
    assert orthogonalize(torch.empty(0, 5), AUTO, dtype=BF16).shape == (0, 5)
    broken = torch.stack([x, x])
    broken[0, 3, 4] = math.nan
    result = orthogonalize(broken, AUTO, dtype=BF16)
    assert result[0].isnan().all()
    assert torch.equal(result[1], orthogonalize(x, AUTO, dtype=BF16))


# Bits.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", [AUTO, keller()], ids=lambda scheme: scheme.name)
def test_bits_depend_on_the_matrix_alone(shape: tuple[int, int], scheme: Scheme, units: None) -> None:
    """Not on address, company, memory order, threads, nor on where the result goes; also where any of these would
    round.
    """
    batch = gaussian(3, *shape)

    def run(x: Tensor, out: Tensor | None = None) -> Tensor:
        return orthogonalize(x, scheme, dtype=BF16, out=out)

    def results() -> Iterator[tuple[str, Tensor]]:
        yield "alone", torch.stack([run(matrix) for matrix in batch])
        yield "together", run(batch)
        yield "elsewhere", run(misplaced(batch, 5), out=misplaced(batch, 7))
        for how in ("columns", "slices", "window"):
            yield how, run(strided((3, *shape), how).copy_(batch))
            yield f"into {how}", run(batch, strided((3, *shape), how))
        yield "in 16 bits", run(batch, torch.empty(3, *shape, dtype=BF16)).float()
        yield "in transposed 16 bits", run(batch, torch.empty(3, *shape[::-1], dtype=BF16).mT).float()

    found = dict(results())
    with HostileArithmetic(company=True):
        hostile = dict(results())
    torch.set_num_threads(2)  # a fixture puts it back
    threaded = run(batch)
    assert torch.equal(threaded, found["alone"])
    for outcomes in (found, hostile):
        for name, result in outcomes.items():
            assert torch.equal(result, outcomes["in 16 bits" if "16 bits" in name else "alone"]), name


def test_the_hostile_machine_tells_memory_orders_of_16_bits_apart() -> None:
    a, b = gaussian(8, 8).bfloat16(), gaussian(8, 8, seed=1).bfloat16()
    with HostileArithmetic() as hostile:
        torch.mm(a, b)
        assert hostile.nudged == 0
        torch.mm(a, b.t().contiguous().t())
        assert hostile.nudged == 1
        torch.mm(a.float(), b.float().t().contiguous().t())
        assert hostile.nudged == 1


# Memory.


@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8), (1, 33, 33), (1, 386, 390)], ids=str)
def test_a_repeated_call_allocates_nothing_beyond_what_is_counted(shape: tuple[int, int, int], units: None) -> None:
    x, workspace = aligned_matrices(shape, F32, CPU).copy_(gaussian(*shape)), Workspace()
    scheme = scheme_for(AUTO, *shape[1:], BF16)
    assert isinstance(scheme, Scheme)
    reserve_scratch(x, scheme, form="auto", dtype=BF16, workspace=workspace)
    held, counted = workspace.bytes(), shape[0] * scratch_bytes(*shape[1:], scheme.steps, BF16, F32)
    assert held <= counted + 4 * 8 * shape[0]
    assert held >= counted or shape[0] > 1  # the matrices of a batch take turns in the buffers of the inverse

    def call() -> None:
        orthogonalize(x, AUTO, dtype=BF16, out=x, workspace=workspace)

    call()
    assert allocations(call) == []
    assert workspace.bytes() == held
