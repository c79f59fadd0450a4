"""Clipping on one device, beside torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmuon.clipping.grad_norm import clip_grad_norm_, total_grad_norm
from meshmuon.errors import ConfigError, GradientError
from tests.support.bounds import norm_error, unit

ORDERS = [0.5, 1.0, 2.0, 3.5, 40.0, math.inf]
SHAPES = [(7, 5), (3,), (), (2, 3, 4), (0, 4)]
# a norm above 1 is increased by 1e-6 first; then a quotient and a product are rounded
CLIPPED = 1e-6 + 4 * unit(torch.float32)


def parameters(
    scale: float = 1.0, dtypes: Iterable[torch.dtype] = (torch.float32,), shapes: Any = SHAPES
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for shape in shapes:
        for dtype in dtypes:
            param = nn.Parameter(torch.zeros(shape, dtype=dtype))
            param.grad = (scale * torch.randn(shape, generator=generator)).to(dtype)
            found.append(param)
    return found


def count(params: Iterable[Tensor]) -> int:
    return sum(param.numel() for param in params)


def grads(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def beside(
    mine: list[nn.Parameter], theirs: list[nn.Parameter], max_norm: float, norm_type: float, foreach: bool | None = None
) -> None:
    # torch has no inf-norm of an empty tensor
    full = [param for param in theirs if param.grad is None or param.grad.numel()]
    wanted = torch.nn.utils.clip_grad_norm_(full, max_norm, norm_type)
    found = clip_grad_norm_(mine, max_norm, norm_type, foreach=foreach)
    assert found.shape == ()
    rtol = 2 * norm_error(count(mine), found.dtype, norm_type)  # theirs is rounded, too
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=0, equal_nan=True)
    for one, other in zip(grads(mine), grads(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol + 6 * unit(found.dtype), atol=0, equal_nan=True)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", ORDERS)
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e3, math.inf])
def test_equals_torch(norm_type: float, max_norm: float, foreach: bool | None) -> None:
    beside(parameters(), parameters(), max_norm, norm_type, foreach)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", ORDERS)
def test_what_is_not_finite_is_as_with_torch(bad: float, norm_type: float) -> None:
    mine, theirs = parameters(), parameters()
    for params in (mine, theirs):
        grads(params)[0][3, 2] = bad
    beside(mine, theirs, 1.0, norm_type)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_error_if_nonfinite(bad: float, norm_type: float) -> None:
    params = parameters()
    grads(params)[0][3, 2] = bad
    before = [grad.clone() for grad in grads(params)]
    with pytest.raises(
        GradientError, match=f"norm of order {norm_type} of all gradients is {bad}; nothing was changed"
    ):
        clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
    with pytest.raises(GradientError, match="nothing was changed"):
        total_grad_norm(params, norm_type, error_if_nonfinite=True)
    for grad, was in zip(grads(params), before, strict=True):
        torch.testing.assert_close(grad, was, rtol=0, atol=0, equal_nan=True)


def test_the_total_alone_changes_nothing() -> None:
    params = parameters()
    before = [grad.clone() for grad in grads(params)]
    wanted = math.sqrt(sum(float(grad.double().square().sum()) for grad in before))
    assert float(total_grad_norm(params)) == pytest.approx(wanted, rel=norm_error(count(params), torch.float32))
    assert all(torch.equal(grad, was) for grad, was in zip(grads(params), before, strict=True))


def test_mixed_dtypes_are_measured_in_float32_at_least() -> None:
    """torch measures bfloat16 in bfloat16, with two digits."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    params = parameters(dtypes=dtypes)
    wide = [grad.float() for grad in grads(params) if grad.numel()]
    wanted = torch.nn.utils.get_total_norm(wide)
    rtol = 2 * norm_error(count(params), torch.float32)
    torch.testing.assert_close(clip_grad_norm_(params, 1.0), wanted, rtol=rtol, atol=0)
    after = torch.nn.utils.get_total_norm([grad.float() for grad in grads(params) if grad.numel()])
    assert float(after) == pytest.approx(1.0, rel=2 * rtol + unit(torch.bfloat16))


def test_float64_and_complex() -> None:
    params = parameters(dtypes=(torch.float64,))
    wanted = torch.nn.utils.get_total_norm(grads(params))
    assert wanted.dtype == total_grad_norm(params).dtype == torch.float64
    torch.testing.assert_close(
        total_grad_norm(params), wanted, rtol=2 * norm_error(count(params), torch.float64), atol=0
    )
    beside(
        parameters(dtypes=(torch.complex64,), shapes=[(3, 4)]),
        parameters(dtypes=(torch.complex64,), shapes=[(3, 4)]),
        0.5,
        2.0,
    )


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda values: values,
    "turned": lambda values: values.t(),
    "every second": lambda values: values[:, ::2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_large_tensors_lose_no_digits(name: str) -> None:
    """One sum over all elements in float32 would lose 4e-4."""
    values = VIEWS[name](torch.randn(3001, 2999, generator=torch.Generator().manual_seed(1)))
    param = nn.Parameter(torch.zeros(values.shape))
    param.grad = values
    wanted = float(values.double().norm())
    rel = norm_error(values.numel(), torch.float32, blocks=values.numel() >> 16)
    assert rel < 1e-5
    assert float(total_grad_norm(param)) == pytest.approx(wanted, rel=rel)
    clip_grad_norm_(param, 1.0)
    assert float(values.double().norm()) == pytest.approx(1.0, rel=rel + 1e-6 / wanted + 4 * unit(torch.float32))


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_type", [0.5, 1.0, 3.0])
def test_other_orders_lose_no_digits(norm_type: float, dtype: torch.dtype, foreach: bool | None) -> None:
    """Added up one after the other in float32, 65,536 powers would lose 1e-5."""
    values = torch.randn(400, 500, generator=torch.Generator().manual_seed(1)).to(dtype)
    param = nn.Parameter(torch.zeros_like(values))
    param.grad = values
    wanted = float(torch.linalg.vector_norm(values.double(), norm_type))
    rel = norm_error(values.numel(), torch.float64, norm_type) + unit(torch.float32)  # of the result
    assert float(total_grad_norm(param, norm_type, foreach=foreach)) == pytest.approx(wanted, rel=rel)


def test_every_kind_of_parameters() -> None:
    params = parameters()
    wanted = total_grad_norm(params)
    optimizer = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 1.0}], lr=0.1)
    assert torch.equal(total_grad_norm(param for param in params), wanted)
    assert torch.equal(total_grad_norm(p for group in optimizer.param_groups for p in group["params"]), wanted)
    assert torch.equal(total_grad_norm([*params, params[0]]), wanted), "a parameter counts once"
    rel = 2 * norm_error(count(params), torch.float32)
    assert float(total_grad_norm(params[0])) == pytest.approx(float(grads(params)[0].norm()), rel=rel)
    assert clip_grad_norm_((param for param in params), 0.5) > 1
    assert float(total_grad_norm(params)) == pytest.approx(0.5, rel=rel + CLIPPED)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_nothing_to_measure(norm_type: float) -> None:
    assert clip_grad_norm_([], 1.0, norm_type) == 0
    assert clip_grad_norm_(nn.Parameter(torch.zeros(3)), 1.0, norm_type, error_if_nonfinite=True) == 0


def test_parameters_without_gradients_are_passed_over() -> None:
    params = parameters()
    wanted = total_grad_norm(params[1:])
    params[0].grad = None
    assert torch.equal(clip_grad_norm_(params, 1.0), wanted)
    assert params[0].grad is None


@pytest.mark.parametrize(
    "limit", [0.5, torch.tensor(0.5), torch.tensor([[0.5]], dtype=torch.float64), nn.Parameter(torch.tensor(0.5))]
)
def test_max_norm_as_a_tensor(limit: Any) -> None:
    params = parameters()
    found = clip_grad_norm_(params, limit)
    assert not found.requires_grad
    assert float(total_grad_norm(params)) == pytest.approx(
        0.5, rel=2 * norm_error(count(params), torch.float32) + CLIPPED
    )


def test_gradients_that_have_gradients() -> None:
    """As create_graph=True leaves them."""
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.full((3,), 2.0, requires_grad=True) * 1.0
    assert not clip_grad_norm_(param, 1.0).requires_grad
    assert float(param.grad.detach().norm()) == pytest.approx(1.0, rel=2 * norm_error(3, torch.float32) + CLIPPED)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "p of 0": (lambda: clip_grad_norm_(parameters(), 1.0, 0.0), r"norm_type=0.0 must be a positive number or inf"),
    "p below 0": (lambda: total_grad_norm(parameters(), -2.0), "norm_type=-2.0"),
    "p of minus infinity": (lambda: total_grad_norm(parameters(), -math.inf), "norm_type=-inf"),
    "p of NaN": (lambda: total_grad_norm(parameters(), math.nan), "norm_type=nan"),
    "p as a word": (lambda: total_grad_norm(parameters(), "fro"), "norm_type='fro'"),  # type: ignore[arg-type]
    "a limit beyond floats": (
        lambda: clip_grad_norm_(parameters(), 10**400),
        "max_norm=1000.* must be a number of at least 0",
    ),
    "a negative limit": (lambda: clip_grad_norm_(parameters(), -1.0), "max_norm=-1.0 must be a number of at least 0"),
    "a limit of NaN": (lambda: clip_grad_norm_(parameters(), math.nan), "max_norm=nan"),
    "a negative tensor": (lambda: clip_grad_norm_(parameters(), torch.tensor(-1.0)), "max_norm=tensor"),
    "two limits": (
        lambda: clip_grad_norm_(parameters(), torch.ones(2)),
        r"one element, got a plain tensor of shape \(2,\)",
    ),
    "no limit": (lambda: clip_grad_norm_(parameters(), "much"), "max_norm='much'"),  # type: ignore[arg-type]
    "groups": (lambda: total_grad_norm([{"params": parameters()}]), r"got dict. Pass model.parameters\(\)"),  # type: ignore[list-item]
    "pairs": (lambda: total_grad_norm(nn.Linear(2, 2).named_parameters()), "got tuple"),  # type: ignore[arg-type]
    "a pipeline": (lambda: total_grad_norm(parameters(), pp_group=3), "pp_group=3 must be a process group"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        call()


def test_sparse_gradients_are_refused_and_nothing_is_written() -> None:
    params = parameters()
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    before = grads(params)[0].clone()
    with pytest.raises(GradientError, match=r"parameter 5 of shape \(4, 3\) has a gradient of layout torch.sparse_coo"):
        clip_grad_norm_([*params, table.weight], 0.1)
    assert torch.equal(grads(params)[0], before)


def test_no_batched_kernels_on_a_device_without_them() -> None:
    param = nn.Parameter(torch.zeros(3, device="meta"))
    param.grad = torch.ones(3, device="meta")
    with pytest.raises(ConfigError, match="foreach=True, but meta has no batched kernels"):
        total_grad_norm(param, foreach=True, error_if_nonfinite=False)
