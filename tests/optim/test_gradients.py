"""Gradients of any layout, dtype and scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmuon import Muon, polar_express
from tests.support.bounds import unit
from tests.support.reference import (
    LR,
    Reference,
    adamw,
    assert_moved_within_rounding,
    assert_same_bits,
    copies,
    gapped,
    gradients,
    group,
    make_params,
    muon,
    run_beside,
    set_gradients,
)

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda grad: grad.mT.contiguous().mT,
    "strided": lambda grad: torch.stack([grad, grad], dim=-1)[..., 0],
    "offset": lambda grad: torch.cat([grad, grad])[len(grad) :],
    "wide rows": lambda grad: nn.functional.pad(grad, (0, 3))[..., : grad.size(-1)],
}


def step_beside(
    first: tuple[Muon, Sequence[Tensor]],
    second: tuple[Muon, Sequence[Tensor]],
    change: Callable[[Tensor], Tensor],
    steps: int = 3,
) -> None:
    """Steps both on the same gradients, but for what ``change`` makes of the first one's."""
    for step in range(steps):
        grads = gradients(second[1], step)
        set_gradients(second[1], grads)
        for param, grad in zip(first[1], grads, strict=True):
            param.grad = change(grad)
        first[0].step()
        second[0].step()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("nesterov", [True, False])
def test_layout_of_gradients_does_not_matter_to_muon(layout: str, nesterov: bool) -> None:
    params = make_params((6, 9), (9, 6), (8, 8), (3, 5, 4))
    twins = copies(params)
    options: dict[str, Any] = {"lr": LR, "nesterov": nesterov, "expert_keys": ["experts"]}
    first, second = ((Muon([group(own, prefix="experts")], **options), own) for own in (params, twins))
    step_beside(first, second, LAYOUTS[layout])
    assert_same_bits(params, twins)


@pytest.mark.parametrize("turned", [False, True], ids=["plain parameter", "transposed parameter"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "contiguous"])
def test_layout_of_gradients_does_not_matter_to_adamw(layout: str, turned: bool) -> None:
    """torch's fused AdamW reads memory in order on CPU and refuses on GPU: mixed layouts must not reach it."""
    plain = make_params((7, 3), (4, 6))
    params = [nn.Parameter(p.detach().mT.contiguous().mT) for p in plain] if turned else copies(plain)
    step_beside((adamw(params, lr=0.1), params), (adamw(plain, lr=0.1), plain), LAYOUTS.get(layout, Tensor.contiguous))
    assert_same_bits(params, plain)


def test_expanded_gradients() -> None:
    """The gradient of a sum is one number seen everywhere."""
    params = make_params((6, 4))
    twins = copies(params)
    params[0].grad = torch.tensor(0.5).expand(6, 4)
    twins[0].grad = torch.full((6, 4), 0.5)
    for own in (params, twins):
        muon(own).step()
    assert_same_bits(params, twins)


def test_transposed_parameters() -> None:
    """A parameter may itself be a transposed view; its momentum is laid out like it."""
    (plain,) = make_params((6, 10))
    turned = nn.Parameter(plain.detach().mT.contiguous().mT)
    assert not turned.is_contiguous()
    first = muon([turned])
    step_beside((first, [turned]), (muon([plain]), [plain]), Tensor.clone)
    assert_same_bits([turned], [plain])
    assert first.state[turned]["momentum_buffer"].stride() == turned.stride()


@pytest.mark.parametrize("use_muon", [True, False])
def test_parameters_with_gaps(use_muon: bool) -> None:
    """Views into a larger tensor: what lies between their entries stays as it is."""
    plain = make_params((6, 5), (4, 7))
    start, params = copies(plain), [gapped(param) for param in plain]
    assert not any(param.is_contiguous() for param in params)
    first, second = (
        (Muon([group(own, use_muon=use_muon)], lr=LR, allow_inactive=not use_muon), own) for own in (params, plain)
    )
    step_beside(first, second, Tensor.clone)
    for param, expected in zip(params, plain, strict=True):
        whole = torch.as_strided(param.detach(), (param.numel() * 2 - 1,), (1,))
        assert not whole[1::2].any()
        # A step of AdamW rounds p twice on each side, and an update of at most about lr a few dozen times.
        limit = 3 * unit(param.dtype) * (4 * (expected.abs() + 3 * LR) + 40 * LR)
        assert use_muon or bool(((param - expected).abs() <= limit).all())
    if use_muon:
        assert_moved_within_rounding(params, plain, start, 3, polar_express())


def test_channels_last_convolution() -> None:
    (plain,) = make_params((8, 4, 3, 3))
    turned = nn.Parameter(plain.detach().contiguous(memory_format=torch.channels_last))
    first, second = muon([turned], conv="flatten"), muon([plain], conv="flatten")
    step_beside((first, [turned]), (second, [plain]), lambda grad: grad.contiguous(memory_format=torch.channels_last))
    assert turned.is_contiguous(memory_format=torch.channels_last)
    assert first.state[turned]["momentum_buffer"].stride() == turned.stride()
    assert_same_bits([turned], [plain])


@pytest.mark.parametrize("exponent", [-80, -20, -1, 1, 33, 80])
@pytest.mark.parametrize("scheme", ["keller", "polar_express"])
def test_powers_of_two_change_no_bit(exponent: int, scheme: str) -> None:
    params = make_params((16, 16), (24, 8), (8, 24))
    twins = copies(params)
    first, second = ((muon(own, scheme=scheme), own) for own in (twins, params))
    step_beside(first, second, lambda grad: grad * 2.0**exponent)
    assert_same_bits(params, twins)


@pytest.mark.parametrize("momentum_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_parameters(dtype: torch.dtype, momentum_dtype: torch.dtype | None) -> None:
    """The update itself is formed in float32: only the rounding of p, and of a half precision momentum, remains."""
    start = make_params((16, 24), (24, 16), dtype=dtype)
    params, reference = copies(start), Reference(start)
    optimizer = muon(params, momentum_dtype=momentum_dtype, lr=0.01, adjust_lr_fn=lambda rows, cols: 20.0)
    run_beside(reference, optimizer, params, range(3), lr=0.01, adjust=lambda rows, cols: 20.0)
    assert all(param.dtype == dtype for param in params)
    assert all(optimizer.state[param]["momentum_buffer"].dtype == (momentum_dtype or dtype) for param in params)
    assert_moved_within_rounding(params, reference.params, start, 3, momentum=momentum_dtype or dtype)


def test_momentum_in_float32_remembers_what_bfloat16_forgets() -> None:
    """Gradients below half a unit in the last place of the momentum vanish in bfloat16; float32 keeps their sum."""
    start = make_params((8, 8), dtype=torch.bfloat16)
    first = torch.ones(8, 8, dtype=torch.bfloat16)
    later = torch.full((8, 8), 2.0**-10, dtype=torch.bfloat16)
    for dtype, expected in ((torch.bfloat16, 1.0), (torch.float32, 1.0 + 8 * 2.0**-10)):
        params = copies(start)
        optimizer = muon(params, momentum_dtype=dtype, momentum=1.0 - 2.0**-40)
        for grad in [first, *[later] * 8]:
            set_gradients(params, [grad])
            optimizer.step()
        assert optimizer.state[params[0]]["momentum_buffer"].unique().tolist() == [expected]


@pytest.mark.parametrize("compute_dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_mixed_dtypes_share_an_optimizer(compute_dtype: torch.dtype | None) -> None:
    """Parameters of one shape but other dtypes never share a buffer, even when their products have one dtype."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32)
    params = [make_params((8, 12), dtype=dtype, seed=k)[0] for k, dtype in enumerate(dtypes)]
    alone = copies(params)
    options: dict[str, Any] = {"deterministic": True, "compute_dtype": compute_dtype}
    optimizer = muon(params, **options)
    singles = [muon([param], **options) for param in alone]
    for step in range(3):
        set_gradients(params, gradients(params, step))
        for own, param, single in zip(params, alone, singles, strict=True):
            set_gradients([param], [own.grad])
            single.step()
        optimizer.step()
    assert_same_bits(params, alone)
