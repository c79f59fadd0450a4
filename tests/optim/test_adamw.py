"""The AdamW part has the bits of torch.optim.AdamW(fused=True)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshmuon import Muon
from tests.support.reference import LR, adamw, assert_same_bits, copies, group, make_params, run, run_alike

SHAPES = ((5,), (3, 4), (), (2, 3, 4), (40, 30))
DEFAULTS: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_ten_steps_have_the_bits_of_torch(dtype: torch.dtype) -> None:
    ours = make_params(*SHAPES, dtype=dtype)
    theirs = copies(ours)
    optimizer, oracle = adamw(ours), torch.optim.AdamW(theirs, **DEFAULTS)
    run(optimizer, ours, range(10))
    run(oracle, theirs, range(10))
    assert_same_bits(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert list(optimizer.state[a]) == list(oracle.state[b]) == ["step", "exp_avg", "exp_avg_sq"]
        assert_same_bits(optimizer.state[a].values(), oracle.state[b].values())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"adamw_betas": (0.8, 0.99)}, {"betas": (0.8, 0.99)}),
        ({"betas": (0.8, 0.99)}, {"betas": (0.8, 0.99)}),
        ({"adamw_betas": (0.8, 0.99), "betas": [0.8, 0.99]}, {"betas": (0.8, 0.99)}),
        ({"adamw_eps": 1e-3}, {"eps": 1e-3}),
        ({"eps": 1e-3}, {"eps": 1e-3}),
        ({"weight_decay": 0.0}, {"weight_decay": 0.0}),
        ({"lr": 0.3}, {"lr": 0.3}),
        ({"maximize": True}, {"maximize": True}),
    ],
    ids=str,
)
def test_options(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Of a group, and of the constructor."""
    params = make_params(*SHAPES)
    again, twins = copies(params), copies(params)
    run(Muon([group(params, use_muon=False, **ours)], lr=LR, allow_inactive=True), params, range(5))
    run(adamw(again, **ours), again, range(5))
    run(torch.optim.AdamW(twins, **{**DEFAULTS, **theirs}), twins, range(5))
    assert_same_bits([*params, *again], [*twins, *twins])


def test_state_follows_a_changed_memory_format() -> None:
    plain = make_params((4, 3, 5, 5))
    moved = copies(plain)
    optimizers = adamw(plain), adamw(moved)
    for step in range(3):
        if step == 1:
            moved[0].data = moved[0].data.to(memory_format=torch.channels_last)
        run_alike((optimizers[0], plain), (optimizers[1], moved), steps=[step])
    assert_same_bits(moved, plain)


def test_state_in_another_memory_order_is_put_in_the_parameters() -> None:
    """Loaded moments may be transposed in memory; the fused kernel walks by address and would mix up their entries."""
    params = make_params((6, 4))
    twins = copies(params)
    optimizer, oracle = adamw(params), torch.optim.AdamW(twins, **DEFAULTS)
    run(optimizer, params, range(2))
    run(oracle, twins, range(2))
    for key in ("exp_avg", "exp_avg_sq"):
        value = optimizer.state[params[0]][key]
        optimizer.state[params[0]][key] = value.mT.contiguous().mT
        assert optimizer.state[params[0]][key].stride() != params[0].stride()
    run(optimizer, params, range(2, 5))
    run(oracle, twins, range(2, 5))
    assert_same_bits(params, twins)
    assert optimizer.state[params[0]]["exp_avg"].stride() == params[0].stride()
