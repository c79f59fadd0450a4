"""Elementwise work on tensors of any length, dtype and place in memory: the same bits, and gradients that are only
read.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshmuon.execute import elementwise
from meshmuon.execute.elementwise import accumulate, adds_uniformly, apply, fill_with_momentum
from meshmuon.execute.fused_elementwise import FusedElementwise, _by_dtype
from tests.support.hostile import HostileArithmetic, fresh_trials, misplaced
from tests.support.reference import assert_same_bits

RETAIN, MOMENTUM, DECAY, RATE = 0.95, 0.9, 0.9987, 0.0123
SIZES = (1, 63, 64, 65, 1000, 4099)
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("momentum", [MOMENTUM, None])
@pytest.mark.parametrize(("grad_dtype", "buffer_dtype"), DTYPES)
def test_momentum_in_company_has_the_bits_of_momentum_alone(
    grad_dtype: torch.dtype, buffer_dtype: torch.dtype, momentum: float | None, hostile: bool
) -> None:
    """Odd sizes at odd addresses, beside a buffer of another dtype."""
    wide = torch.float64 if grad_dtype == torch.float64 else torch.float32
    grads = [random(size, seed=size, dtype=grad_dtype) for size in SIZES]
    start = [random(size, seed=size + 1, dtype=buffer_dtype) for size in SIZES]
    start[2] = start[2].bfloat16()
    alone, views = ([torch.zeros(size, dtype=wide) for size in SIZES] for _ in range(2))
    alone_buffers, buffers = (
        [buffer.clone() for buffer in start],
        [misplaced(buffer, k) for k, buffer in enumerate(start)],
    )
    with fresh_trials(), HostileArithmetic() if hostile else nullcontext():
        for view, grad, buffer in zip(alone, grads, alone_buffers, strict=True):
            fill_with_momentum([view], [grad], [buffer], RETAIN, momentum)
        fill_with_momentum(views, [misplaced(grad, 3) for grad in grads], buffers, RETAIN, momentum)
    assert_same_bits([*buffers, *views], [*alone_buffers, *alone])


def test_tensors_with_gaps() -> None:
    grad, start = random(67, 41, seed=1), random(67, 41, seed=2)
    whole, wanted = start.clone(), torch.zeros(67, 41)
    fill_with_momentum([wanted], [grad], [whole], RETAIN, MOMENTUM)
    buffer, view = torch.zeros(67, 50)[:, 3:44].copy_(start), torch.zeros(41, 67).T
    fill_with_momentum([view], [grad], [buffer], RETAIN, MOMENTUM)
    assert_same_bits([buffer, view], [whole, wanted])
    param = torch.zeros(67, 50)[:, 5:46].copy_(start)
    apply([param], [grad], DECAY, RATE)
    apply([whole.copy_(start)], [grad], DECAY, RATE)
    assert_same_bits([param], [whole])


def test_gradients_are_only_read() -> None:
    """Also those that torch has yet to negate or to fill with zeros, and those made in inference mode."""
    ones = torch.ones(64)
    with torch.inference_mode():
        of_inference = torch.ones(64)
    for grad, value in (
        (ones, 1.0),
        (torch._neg_view(ones), -1.0),
        (torch._efficientzerotensor(64), 0.0),
        (of_inference, 1.0),
    ):
        view, buffer = torch.empty(64), torch.full((64,), 2.0)
        version = None if grad.is_inference() else grad._version
        fill_with_momentum([view], [grad], [buffer], 0.5, 0.5)
        assert buffer.eq(1.0 + value).all()
        assert view.eq(value + 0.5 * (1.0 + value)).all()
        assert version is None or grad._version == version


@pytest.mark.parametrize("decay", [0.0, 1.0, DECAY])
def test_updates_keep_what_is_not_finite_and_the_sign_of_zeros(decay: float) -> None:
    start, update = random(100, seed=1), torch.zeros(100)
    start[:4] = torch.tensor([torch.nan, torch.inf, -0.0, 0.0])
    update[4:6] = torch.tensor([torch.nan, -torch.inf])
    for rate in (RATE, -RATE, 0.0):
        param = start.clone()
        apply([param], [update.clone()], decay, rate)
        alike = adds_uniformly(torch.float32, torch.float32)
        decayed = start.mul(decay)
        wanted = decayed.add(update, alpha=-rate) if alike else decayed.sub(update.mul(rate).add(0.0))
        assert torch.equal(param.view(torch.int32), wanted.view(torch.int32))


def test_the_default_device_does_not_matter() -> None:
    start, update = random(1003, seed=1), random(1003, seed=2)
    param, wanted = start.clone(), start.clone()
    apply([wanted], [update.clone()], DECAY, RATE)
    with fresh_trials(), torch.device("meta"):
        apply([param], [update], DECAY, RATE)
    assert_same_bits([param], [wanted])


class Elsewhere(Tensor):
    """A tensor that says it is on a device with batched kernels."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


BATCHED = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16,) * 2,
]


@pytest.mark.parametrize(("grad_dtype", "momentum_dtype"), BATCHED)
def test_batched_and_single_operations_agree(grad_dtype: torch.dtype, momentum_dtype: torch.dtype) -> None:
    """What a GPU does, done here, beside what a CPU does; a fused multiply-add rounds once less."""
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator).to(grad_dtype) for shape in ((5, 7), (3, 4), (40, 33))]
    start = [torch.randn(grad.shape, generator=generator).to(momentum_dtype) for grad in grads]
    wide = torch.float64 if grad_dtype == torch.float64 else torch.float32
    for kind in (Tensor, Elsewhere):
        buffers = [buffer.clone().as_subclass(kind) for buffer in start]
        views = [torch.zeros(grad.shape, dtype=wide).as_subclass(kind) for grad in grads]
        fill_with_momentum(views, grads, buffers, 0.9, 0.9)
        for before, grad, buffer, view in zip(start, grads, buffers, views, strict=True):
            assert_near(buffer.as_subclass(Tensor), 0.9 * before.double() + grad.double())
            assert_near(view.as_subclass(Tensor), grad.double() + 0.9 * buffer.as_subclass(Tensor).double())


def assert_near(value: Tensor, exact: Tensor) -> None:
    """Within two roundings."""
    bound = torch.finfo(value.dtype).eps * (1 + float(exact.abs().max()))
    torch.testing.assert_close(value.double(), exact, rtol=0, atol=bound)


@pytest.mark.parametrize("update", [1.0, -1.0, 0.0, -0.0])
def test_a_rate_of_zero_on_a_device_keeps_the_sign_of_zeros(update: float) -> None:
    params = [torch.tensor([-0.0, 0.0, 1.0])]
    apply(params, [torch.full((3,), update)], torch.tensor(1.0), torch.tensor(0.0))
    assert params[0].tolist() == [0.0, 0.0, 1.0]
    assert torch.signbit(params[0]).tolist() == [True, False, False]


@pytest.mark.parametrize("rate", [RATE, torch.tensor(RATE)], ids=["float", "tensor"])
def test_an_update_from_a_wire_of_16_bits_is_multiplied_in_full_precision(
    rate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the lr is a tensor, and on a CPU whose scaled sums are not uniform."""
    monkeypatch.setattr(elementwise, "adds_uniformly", lambda *dtypes: False)
    param, update = random(100, seed=1), random(100, seed=2).bfloat16()
    expected = param - update.float() * RATE
    apply([param], [update], 1.0, rate)
    assert_same_bits([param], [expected])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_momentum_in_16_bits_is_rounded_alike_wherever_an_element_lies(dtype: torch.dtype) -> None:
    """In every cut of the tensor; by the product and by the sum."""
    generator = torch.Generator().manual_seed(0)
    grad, start = (torch.randn(203, generator=generator).to(dtype) for _ in range(2))
    expected = (start * 0.9) + grad
    for size in (203, 64, 7, 1):
        buffer = start.clone()
        accumulate(list(buffer.split(size)), list(grad.split(size)), 0.9)
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize("tensor_rate", [True, False])
def test_cautious_decay_is_for_what_moves_towards_zero_or_not_at_all(tensor_rate: bool) -> None:
    params = [torch.tensor([8.0, 8.0, 8.0, -8.0])]
    rate: Any = torch.tensor(1.0) if tensor_rate else 1.0
    apply(params, [torch.tensor([1.0, -1.0, 0.0, -1.0])], 0.5, rate, cautious=True)
    assert params[0].tolist() == [3.0, 9.0, 4.0, -3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rate", [RATE, -RATE])
def test_a_rate_that_stays_a_tensor(dtype: torch.dtype, rate: float) -> None:
    """On a GPU the host never reads the rate. The arithmetic is the same, but for a fused multiply-add and one
    rounding.
    """
    start, update = (
        random(1003, seed=1, dtype=dtype),
        random(1003, seed=2).to(torch.promote_types(dtype, torch.float32)),
    )
    for factors in ((DECAY, rate), (torch.tensor(DECAY, dtype=torch.float64), torch.tensor(rate, dtype=torch.float64))):
        param = start.clone()
        apply([param], [update.clone()], *factors)
        assert_near(param, DECAY * start.double() - rate * update.double())


def test_each_launch_is_for_tensors_of_one_device() -> None:
    def on(device: str, dtype: torch.dtype = torch.float32) -> Any:
        return SimpleNamespace(device=torch.device(device), dtype=dtype)

    first, second, host, double = on("cuda:0"), on("cuda:1"), on("cpu"), on("cuda:0", torch.float64)
    targets, sources = [first, second, first, host, double], [first, second, second, host, first]
    assert list(_by_dtype(zip(targets, sources, strict=True))) == [
        (True, [[first], [first]]),
        (True, [[second], [second]]),
        (False, [[first], [second]]),
        (False, [[host], [host]]),
        (False, [[double], [first]]),
    ]


def test_what_the_kernels_leave_to_torch_is_rounded_once_for_the_wire() -> None:
    """Momentum of 64 bits is torch's. In bfloat16 a gradient would be rounded before the momentum is added."""
    grad, buffer = random(4099, seed=1), random(4099, seed=2, dtype=torch.float64)
    view, wide, copy = torch.empty(4099, dtype=torch.bfloat16), torch.empty(4099), buffer.clone()
    fill_with_momentum([wide], [grad], [copy], RETAIN, MOMENTUM)
    FusedElementwise.__new__(FusedElementwise).fill([view], [grad], [buffer], RETAIN, MOMENTUM)
    assert_same_bits([view, buffer], [wide.bfloat16(), copy])
