"""Every option of a Muon group against the plain float64 reference; float64 parameters leave no room for tolerance."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from meshmuon import ConfigError, DistMuon, Muon, polar_express
from tests.support.bounds import sum_error
from tests.support.reference import (
    LR,
    Reference,
    Shape,
    assert_moved_within_rounding,
    assert_same_bits,
    copies,
    gradients,
    group,
    make_params,
    muon,
    run,
    run_beside,
    set_gradients,
)

SHAPES: tuple[Shape, ...] = ((20, 20), (40, 12), (12, 40), (12, 40), (1, 7), (7, 1))
STEEPEST = polar_express(steps=10)  # of the schemes here: as steep as the polar factor


def compare(ours: dict[str, Any], plain: dict[str, Any], *, steps: int = 4, shapes: tuple[Shape, ...] = SHAPES) -> None:
    """Runs Muon with ``ours`` beside the reference with ``plain``."""
    start = make_params(*shapes, dtype=torch.float64)
    params, reference = copies(start), Reference(start)
    optimizer = muon(params, **ours)
    run_beside(reference, optimizer, params, range(steps), **plain)
    assert_moved_within_rounding(params, reference.params, start, steps, STEEPEST)


def test_callable_scheme_sees_a_batch_of_one_shape() -> None:
    seen: list[Shape] = []

    def scheme(batch: Tensor) -> Tensor:
        seen.append(tuple(batch.shape))
        return batch

    params = make_params((4, 8), (4, 4), (4, 8))  # each fills a multiple of 64 bytes; others come one by one
    run(muon(params, scheme=scheme), params, [0])
    assert sorted(seen) == [(1, 4, 4), (2, 4, 8)]


def test_default_numbers() -> None:
    """Defaults of the constructor, run against the reference with the numbers written out."""
    start = make_params(*SHAPES, dtype=torch.float64)
    params, reference = copies(start), Reference(start)
    optimizer = Muon([group(params)])
    numbers = {
        "lr": 1e-3,
        "momentum": 0.95,
        "nesterov": True,
        "weight_decay": 0.1,
        "steps": polar_express(steps=5).steps,
    }
    run_beside(reference, optimizer, params, range(3), **numbers)
    assert_moved_within_rounding(params, reference.params, start, 3, polar_express(steps=5))


def test_groups_of_one_shape_keep_their_own_numbers() -> None:
    """Matrices of several groups share a batch; each keeps its group's numbers."""
    first: dict[str, Any] = {
        "lr": 0.01,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 0.0,
        "adjust_lr_fn": "original",
    }
    second: dict[str, Any] = {"lr": 0.003, "momentum": 0.5, "weight_decay": 1.0, "maximize": True}
    start = make_params((8, 12), (8, 12), (8, 12), dtype=torch.float64)
    params = copies(start)
    optimizer = Muon([group(params[:1], **first), group(params[1:], prefix="more", **second)], scheme="keller")
    references = [Reference(start[:1]), Reference(start[1:])]
    for step in range(3):
        grads = gradients(params, step)
        set_gradients(params, grads)
        optimizer.step()
        references[0].step(
            grads[:1], **{**{k: v for k, v in first.items() if k != "adjust_lr_fn"}, "adjust": "original"}
        )
        references[1].step(grads[1:], **second)
    assert_moved_within_rounding(params, [p for reference in references for p in reference.params], start, 3)


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original", "spectral"])
@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8), (1, 6, 9)], ids=str)
def test_experts_are_separate_matrices(shape: Shape, rule: str) -> None:
    start = make_params(shape, dtype=torch.float64)
    params, reference = copies(start), Reference(start, experts=True)
    optimizer = Muon(
        [{"params": params, "names": ["moe.experts.w1"], "use_muon": True}],
        lr=LR,
        scheme="keller",
        adjust_lr_fn=rule,
        expert_keys=["experts"],
    )
    run_beside(reference, optimizer, params, range(3), adjust=rule)
    assert_moved_within_rounding(params, reference.params, start, 3)
    assert optimizer.state[params[0]]["momentum_buffer"].shape == shape


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("shape", [(16, 3, 3, 3), (24, 2, 3), (4, 3, 2, 2, 3)], ids=str)
def test_flattened_convolutions(shape: Shape, rule: str) -> None:
    """A filter is one (out, in·kernel) matrix; its rate comes from that shape."""
    compare({"conv": "flatten", "adjust_lr_fn": rule}, {"adjust": rule}, shapes=(shape, shape))


def test_float32_agrees_with_float64_reference() -> None:
    start = make_params(*SHAPES)
    params, reference = copies(start), Reference(start)
    optimizer = muon(params)
    run_beside(reference, optimizer, params, range(5))
    assert_moved_within_rounding(params, reference.params, start, 5)
    for param, buffer in zip(params, reference.buffers, strict=True):
        # Five sums of two numbers each, whose parts are no larger than 5 gradients of up to 3 times 5.
        bound = sum_error(10, torch.float32) * 75
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"].double(), buffer, rtol=0, atol=bound)


@pytest.mark.parametrize("maximize", [True, False])
def test_zero_gradients_only_decay(maximize: bool) -> None:
    """Checkpointing code creates state by a step of zero gradients and zero rate; neither may bring NaN."""
    params = make_params((6, 4), (4, 6))
    start = copies(params)
    optimizer = muon(params, lr=0.01, weight_decay=0.5, maximize=maximize)
    set_gradients(params, [torch.zeros_like(p) for p in params])
    optimizer.step()
    assert_same_bits(params, [p.detach() * (1 - 0.01 * 0.5) for p in start])


def rates(optimizer: Muon) -> list[float]:
    return [float(param_group["lr"]) for param_group in optimizer.param_groups]


@pytest.mark.parametrize("build", [Muon, DistMuon])
def test_the_learning_rate_of_adamw_s_part(build: type[Muon]) -> None:
    """Written once into the groups that have none of their own, so that schedulers begin from it; a group's own lr
    wins.
    """
    matrix, norm, table, late = make_params((4, 6), (5,), (7, 3), (8,))
    groups = [
        group([matrix]),
        group([norm], use_muon=False, prefix="n"),
        group([table], use_muon=False, prefix="t", lr=0.03),
    ]
    optimizer = build(groups, lr=LR, adamw_lr=0.001)
    assert rates(optimizer) == [LR, 0.001, 0.03]
    for twin in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twin.add_param_group(group([late], use_muon=False, prefix="late"))
        assert rates(twin)[3] == 0.001
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    assert rates(optimizer) == [LR / 2, 0.0005, 0.015, 0.0005]
    fresh = build([*groups, group([late], use_muon=False, prefix="late")], lr=LR)
    fresh.load_state_dict(optimizer.state_dict())
    assert rates(fresh) == rates(optimizer)
    with pytest.raises(ConfigError, match="group 0: adamw_lr holds for the whole optimizer"):
        build([group([matrix], adamw_lr=0.1)])
