"""Gradients that are not finite: a step is made as a whole or not at all.

What runs on a GPU, where the host must not wait to know, is forced on CPU by ``masked``: the step is then made with
numbers under which nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmuon import GradientError, Muon, polar_express
from meshmuon.optim import adamw
from meshmuon.state import param_state
from tests.support.bounds import unit
from tests.support.reference import LR, Run, assert_moved_within_rounding, gradients, group, make_params, set_gradients
from tests.support.tensors import assert_bits

BAD = [math.nan, math.inf, -math.inf]
MATRICES, VECTORS = ((6, 4), (4, 9), (6, 4)), ((5,), (7, 3))


def groups(dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Three matrices for Muon, two parameters for AdamW."""
    vectors = make_params(*VECTORS, dtype=dtype, seed=1)
    return [group(make_params(*MATRICES, dtype=dtype)), group(vectors, use_muon=False, prefix="norms")]


def skipping(dtype: torch.dtype = torch.float32, **options: Any) -> Run:
    return Run(groups(dtype), **{"nonfinite": "skip", **options})


def snapshot(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("k", range(5))
def test_skip_leaves_everything_as_it_is(k: int, bad: float, path: str) -> None:
    """One element of any gradient, of Muon's or AdamW's; later steps are those of a run that never saw it."""
    run, expected = skipping(), skipping()
    for step in range(2):
        run.step(step)
        expected.step(step)
    before = snapshot(run.everything())
    run.step(2, bad=(k, bad))
    assert_bits(run.everything(), before)
    assert run.optimizer.skipped_steps == 1
    run.step(2, bad=(k, bad))
    run.step(3)
    expected.step(3)
    assert_bits(run.everything(), expected.everything())
    assert (run.optimizer.skipped_steps, expected.optimizer.skipped_steps) == (2, 0)


def test_a_first_step_that_is_skipped(path: str) -> None:
    """What state there is afterwards, if any, is zeros."""
    run, expected = skipping(), skipping()
    start = snapshot(run.params)
    run.step(0, bad=(1, math.nan))
    assert_bits(run.params, start)
    assert not any(bool(value.any()) for entry in run.optimizer.state.values() for value in entry.values())
    assert run.optimizer.skipped_steps == 1
    run.step(1)
    expected.step(1)
    assert_bits(run.everything(), expected.everything())


def test_signs_of_zeros_survive_a_masked_skip(masked: None) -> None:
    """Momentum and weights of −0 stay −0."""
    run = skipping(nesterov=True)
    run.step(0)
    for entry in run.optimizer.state.values():
        for key, value in entry.items():
            if key != "step":
                value.view(-1)[::2] = -0.0
    for param in (*run.params[3:], *run.params[:3]):
        param.data.view(-1)[::2] = -0.0
    before = snapshot(run.everything())
    run.step(1, bad=(0, math.nan))
    assert_bits(run.everything(), before)


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False},
        {"maximize": True},
        {"weight_decay": 0.0},
        {"scheme": "keller"},
        {"use_distributed_muon": True},
        {"momentum_dtype": torch.bfloat16},
        {"none_grad": False},
        {"lr": torch.tensor(LR)},
        {"rule": "normuon"},
        {"cautious_weight_decay": True},
        {"dtype": torch.float16},
        {"dtype": torch.float64},
        {"rounding": "stochastic", "dtype": torch.bfloat16},
        {"rounding": "stochastic", "dtype": torch.bfloat16, "use_distributed_muon": True},
    ],
    ids=str,
)
def test_skipping_under_other_options(options: dict[str, Any], path: str) -> None:
    run, expected = skipping(**options), skipping(**options)
    for one in (run, expected):
        one.step(0)
    run.step(1, bad=(0, math.inf))
    for one in (run, expected):
        one.step(2)
    assert_bits(run.everything(), expected.everything())


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        (torch.float32, 3e38),
        (torch.float64, 1e300),
        (torch.bfloat16, 3e38),
        (torch.float16, 65504.0),
        (torch.float32, -3e38),
    ],
    ids=str,
)
def test_large_is_not_infinite(dtype: torch.dtype, largest: float, path: str) -> None:
    """Its sum or its square would be. Without Nesterov, which adds gradient and momentum."""
    run = skipping(
        dtype=dtype, nesterov=False, momentum_dtype=torch.float64 if dtype == torch.float64 else torch.float32
    )
    run.step(0, bad=(0, largest))
    run.step(1, bad=(3, largest / 1e30 if dtype != torch.float16 else largest))
    assert run.optimizer.skipped_steps == 0
    assert all(bool(param.isfinite().all()) for param in run.params)
    assert float(run.optimizer.state[run.params[0]]["momentum_buffer"].abs().max()) > 0.9 * abs(largest)


@pytest.mark.parametrize("options", [{}, {"nonfinite": "propagate"}], ids=str)
def test_propagate_is_the_default_and_steps_with_it(options: dict[str, Any]) -> None:
    run = Run(groups(), **options)
    run.step(0)
    run.step(1, bad=(0, math.nan))
    assert bool(run.params[0].isnan().any())
    assert run.optimizer.skipped_steps == 0


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_raise_names_the_parameter_and_writes_nothing(bad: float, path: str) -> None:
    run = skipping(nonfinite="raise")
    run.step(0)
    before = snapshot(run.everything())
    with pytest.raises(GradientError, match=r"^norms\.1\.weight has a gradient that is not finite"):
        run.step(1, bad=(4, bad))
    assert_bits(run.everything(), before)
    expected = skipping(nonfinite="raise")
    expected.step(0)
    for one in (run, expected):
        one.step(1)
    assert_bits(run.everything(), expected.everything())
    assert run.optimizer.skipped_steps == 0


@pytest.mark.parametrize("none_grad", [True, False])
def test_gradients_are_freed_as_by_a_step(none_grad: bool, path: str) -> None:
    run = skipping(none_grad=none_grad)
    run.step(0, bad=(0, math.nan))
    assert all((param.grad is None) is none_grad for param in run.params[:3])
    assert all(param.grad is not None for param in run.params[3:])


def test_parameters_without_a_gradient_do_not_matter(path: str) -> None:
    run = skipping()
    run.step(0)
    before = snapshot(run.everything())
    run.step(1, without=range(5))
    run.step(1, without=(0, 2, 3, 4), bad=(1, math.nan))
    assert_bits(run.everything(), before)
    assert run.optimizer.skipped_steps == 1


def test_empty_gradients_are_finite(path: str) -> None:
    empty, full = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(3))
    optimizer = Muon([group([empty, full], use_muon=False)], nonfinite="skip", allow_inactive=True)
    set_gradients([empty, full], [torch.zeros(0), torch.ones(3)])
    optimizer.step()
    assert optimizer.skipped_steps == 0
    assert not torch.equal(full, torch.ones(3))


# ---- the masked path, which a GPU takes
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_finite_masked_steps_move_as_unmasked_ones(
    dtype: torch.dtype, masked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW bit for bit. In the momentum and the update of a matrix the product is rounded before the sum, which a
    float's fused
    multiply-add does not: a few units in the last place. In float64, a rate or decay rounded to float32 would show at
    1e-8."""
    run = skipping(dtype)
    start = snapshot(run.params)
    for step in range(5):
        run.step(step)
    monkeypatch.undo()
    expected = skipping(dtype)
    for step in range(5):
        expected.step(step)
    states, wanted = run.everything()[5:], expected.everything()[5:]
    assert_bits([*run.params[3:], *states[3:]], [*expected.params[3:], *wanted[3:]])
    sizes = [
        sum(grad.abs() for grad in grads)
        for grads in zip(*(gradients(start[:3], step) for step in range(5)), strict=True)
    ]
    for momentum, other, size in zip(states[:3], wanted[:3], sizes, strict=True):
        # Both sums are rounded, and one product: three roundings a step of what is no larger than all gradients
        # together.
        assert bool(((momentum - other).abs() <= 5 * 3 * unit(dtype) * size).all())
    assert_moved_within_rounding(run.params[:3], expected.params[:3], start[:3], 5, polar_express())


@pytest.mark.parametrize("scaled", [False, True])
def test_a_device_whose_values_the_host_cannot_read(scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device have no values: whatever reads one raises. Muon, AdamW, mask and scale all run
    there.
    """
    monkeypatch.setattr(param_state, "_FUSED_DEVICES", ("cpu", "meta"))
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in (*MATRICES, *VECTORS)]
    optimizer = Muon(
        [group(params[:3]), group(params[3:], use_muon=False)], nonfinite="propagate" if scaled else "skip"
    )
    for _ in range(3):
        set_gradients(params, [torch.empty_like(param) for param in params])
        if scaled:
            optimizer.grad_scale = torch.ones((), device="meta")  # type: ignore[attr-defined]
            optimizer.found_inf = torch.ones((), device="meta")  # type: ignore[attr-defined]
        optimizer.step()
    with pytest.raises(RuntimeError, match="meta"):
        _ = optimizer.skipped_steps
    assert all(value.device.type == "meta" for entry in optimizer.state.values() for value in entry.values())


def test_adamw_that_cannot_fuse(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's plain step knows no ``found_inf``: it is made and undone."""

    def no_fusing(param: Tensor) -> bool:
        return False

    monkeypatch.setattr(adamw, "can_fuse", no_fusing)
    run, expected = skipping(), skipping()
    for one in (run, expected):
        one.step(0)
    before = snapshot(run.everything())
    run.step(1, bad=(3, math.nan))
    assert_bits(run.everything(), before)
    for one in (run, expected):
        one.step(2)
    assert_bits(run.everything(), expected.everything())
    assert [float(run.optimizer.state[param]["step"]) for param in run.params[3:]] == [2.0, 2.0]
