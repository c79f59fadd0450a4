"""Elementwise work on tensors of any length, dtype and place in memory: the same bits, and gradients that are only read."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from meshmuon.execute.elementwise import adds_alike, apply, fill_with_momentum
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
    alone_buffers, buffers = [buffer.clone() for buffer in start], [misplaced(buffer, k) for k, buffer in enumerate(start)]
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
    for grad, value in ((ones, 1.0), (torch._neg_view(ones), -1.0), (torch._efficientzerotensor(64), 0.0), (of_inference, 1.0)):
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
        alike = adds_alike(torch.float32, torch.float32)
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
