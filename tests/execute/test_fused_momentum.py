"""Momentum and look-ahead in one pass: the bits of separate operations, however often torch's fused kernel rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from meshmuon.execute import fused_momentum, portions
from meshmuon.execute.elementwise import accumulate, accumulates_once, adds_alike, fill_with_momentum, look_ahead
from meshmuon.execute.fused_momentum import fused_rounding
from meshmuon.execute.one_pass import LARGE, VECTOR_MULTIPLE
from tests.support.hostile import HostileArithmetic, fresh_trials, misplaced
from tests.support.reference import assert_same_bits

MOMENTUM = 0.93
SIZES = (5, LARGE, LARGE + 1, LARGE - VECTOR_MULTIPLE, 2 * LARGE + VECTOR_MULTIPLE, 5 * LARGE)
Kernel = Callable[..., bool]


def random(size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return misplaced(torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype), seed % 7)


def kernel_that_rounds(kind: str, calls: list[int]) -> Kernel:
    """What another CPU's kernel would do; ``own`` is that of this CPU. Notes the elements of each call."""
    own = fused_momentum.fused_momentum

    def kernel(views: list[Tensor], grads: list[Tensor], momenta: list[Tensor], momentum: float, *, nesterov: bool) -> bool:
        calls.append(sum(view.numel() for view in views))
        if kind == "missing":
            return False
        if kind == "own":
            return own(views, grads, momenta, momentum, nesterov=nesterov)
        for view, grad, buffer in zip(views, grads, momenta, strict=True):
            if kind == "once":
                torch.add(grad, buffer, alpha=momentum, out=buffer)
            else:
                buffer.mul_(momentum).add_(grad)
            if kind == "elsewhere":  # a third way to round
                buffer.nextafter_(torch.zeros_like(buffer))
            view.add_(torch.add(grad, buffer, alpha=momentum) if nesterov else buffer)
        return True

    return kernel


@pytest.fixture(params=["own", "once", "twice", "elsewhere", "missing"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, kind: str) -> Iterator[list[int]]:
    """The elements of each call of the fused kernel, from the end of the trial on."""
    noted: list[int] = []
    monkeypatch.setattr(fused_momentum, "fused_momentum", kernel_that_rounds(kind, noted))
    with fresh_trials():
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            accumulates_once(dtype)
        noted.clear()
        yield noted


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("momentum", [MOMENTUM, None])
def test_fused_or_not_the_bits_are_the_same(
    monkeypatch: pytest.MonkeyPatch, calls: list[int], kind: str, momentum: float | None, dtype: torch.dtype, threads: int
) -> None:
    """Sizes below and above the limits, with and without elements beyond whole vectors, at odd addresses."""
    monkeypatch.setattr(portions, "PORTION", LARGE)
    monkeypatch.setattr(fused_momentum, "AT_A_TIME", 3 * LARGE)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    grads, start = ([random(size, 2 * k + n, dtype) for k, size in enumerate(SIZES)] for n in range(2))
    grads[1][:4] = start[1][:4] = torch.tensor([-0.0, torch.nan, torch.inf, 0.0])
    whole, buffers = [buffer.clone() for buffer in start], [misplaced(buffer, 1) for buffer in start]
    wanted, views = ([torch.full_like(buffer, torch.nan) for buffer in start] for _ in range(2))
    accumulate(whole, grads, MOMENTUM)
    if momentum is None:
        torch._foreach_copy_(wanted, whole)
    else:
        look_ahead(wanted, grads, whole, momentum)
    assert calls == []
    fill_with_momentum(views, grads, buffers, MOMENTUM, momentum)
    for found, expected in zip([*buffers, *views], [*whole, *wanted], strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        assert_same_bits([found.nan_to_num_(0.0)], [expected.nan_to_num_(0.0)])
        assert torch.equal(found.signbit(), expected.signbit())
    fusable = [size for size in SIZES if size >= LARGE and size % VECTOR_MULTIPLE == 0]
    fuses = adds_alike(dtype, dtype) and (kind in ("once", "twice") or (kind == "own" and fused_rounding(dtype) is not None))
    assert sum(calls) == (sum(fusable) if fuses else 0)
    assert max(calls, default=0) <= 3 * LARGE


def test_a_trial_tells_how_often_the_kernel_rounds(calls: list[int], kind: str) -> None:
    if kind == "own" or not adds_alike(torch.float32, torch.float32):
        return
    grad, buffer = random(1000, 1), random(1000, 2)
    fused_sum = not torch.equal(torch.add(grad, buffer, alpha=MOMENTUM), buffer.mul(MOMENTUM).add_(grad))
    expected = {"once": "once", "twice": "twice" if fused_sum else "once"}  # CPUs without FMA round a·b + c twice anyway
    assert fused_rounding(torch.float32) == expected.get(kind)
    assert accumulates_once(torch.float32) is (fused_rounding(torch.float32) != "twice")


@pytest.mark.parametrize("kind", ["twice"], indirect=True)
def test_what_cannot_be_fused_is_not(calls: list[int]) -> None:
    def filled(view: Tensor, grad: Tensor, buffer: Tensor, retain: float = MOMENTUM, momentum: float | None = MOMENTUM) -> int:
        calls.clear()
        fill_with_momentum([view], [grad], [buffer], retain, momentum)
        return sum(calls)

    view, grad, buffer = (random(LARGE, k) for k in range(3))
    expected = LARGE if adds_alike(torch.float32, torch.float32) else 0
    assert filled(view, grad, buffer) == expected
    assert filled(view, grad, buffer, 0.95, 0.9) == 0  # one number serves both
    assert filled(view, grad, buffer, 0.0, 0.0) == 0  # the kernel would take it for SGD without momentum
    assert filled(view, grad.bfloat16(), buffer) == 0
    assert filled(view, grad, buffer.bfloat16()) == 0
    gaps = torch.zeros(LARGE // 64, 70)[:, 3:67]
    square = (LARGE // 64, 64)
    assert filled(gaps, grad.view(square), buffer.view(square)) == 0
    assert filled(view.view(square), torch.zeros(64, LARGE // 64).T, buffer.view(square)) == 0
    assert filled(view, torch._neg_view(grad), buffer) == 0
    assert filled(view, torch._efficientzerotensor(LARGE), buffer) == 0
    with torch.inference_mode():
        of_inference = grad.clone()
    assert filled(view, of_inference, buffer) == 0
    with torch.inference_mode(), fresh_trials():
        filled(view.clone(), of_inference, buffer.clone())


def test_a_gradient_is_not_taken_for_overwritten() -> None:
    view, grad, buffer = (random(LARGE, k) for k in range(3))
    before, version = grad.clone(), grad._version
    fill_with_momentum([view], [grad], [buffer], MOMENTUM, MOMENTUM)
    assert torch.equal(grad, before)
    assert grad._version == version


def test_a_machine_that_rounds_by_place_fuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(fused_momentum, "fused_momentum", kernel_that_rounds("own", calls))
    view, grad, buffer = (random(LARGE, k) for k in range(3))
    with fresh_trials(), HostileArithmetic():
        fill_with_momentum([view], [grad], [buffer], MOMENTUM, MOMENTUM)
    assert calls == []
