"""Against torch.optim.Muon, with its Newton–Schulz in the parameter's dtype and as shipped (bfloat16)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from meshmuon import Muon, get_default_muon_param_groups
from meshmuon.dropped import NAMES
from meshmuon.ortho import keller
from tests.support.bounds import nudge, orthogonalize_error
from tests.support.reference import (
    FACTORS,
    KELLER_5,
    LR,
    Shape,
    assert_moved_alike,
    assert_moved_within_rounding,
    copies,
    gradients,
    make_params,
    muon,
    newton_schulz,
    run,
    set_gradients,
)

BLOCKED: tuple[Shape, ...] = ((400, 400), (512, 392), (392, 640))  # from 384 rows on, symmetric products go by panels


def compare(shapes: tuple[Shape, ...], dtype: torch.dtype, steps: int = 10, form: str = "auto", **options: Any) -> None:
    start = make_params(*shapes, dtype=dtype)
    ours, theirs = copies(start), copies(start)
    options = {"adjust_lr_fn": "match_rms_adamw", **options}
    run(muon(ours, form=form, **options), ours, range(steps))
    run(torch.optim.Muon(theirs, lr=LR, **options), theirs, range(steps))
    assert_moved_within_rounding(ours, theirs, start, steps, keller(options.get("ns_steps", 5)))


@pytest.mark.usefixtures("precise_torch")
@pytest.mark.parametrize("form", ["auto", "standard", "gram"])
def test_blocked_sizes_equal_torch(form: str) -> None:
    compare(BLOCKED, torch.float32, steps=4, form=form)


@pytest.mark.usefixtures("precise_torch")
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "momentum": 0.5}, {"weight_decay": 0.0, "ns_steps": 3}], ids=str
)
def test_the_call_that_replaces_torch_muon_makes_torchs_updates(options: dict[str, Any]) -> None:
    """Torch's momentum is a mean of the gradients and ours their sum: a factor, which orthogonalising removes."""
    call, _, _ = NAMES["TorchMuon"].partition(" makes the same updates")
    start = make_params((24, 24), (48, 16), (16, 48), (33, 50), dtype=torch.float64)
    ours, theirs = copies(start), copies(start)
    optimizer = eval(
        call.removesuffix(")") + ", **options)", {"Muon": Muon, "matrices": ours, "lr": LR, "options": options}
    )
    run(optimizer, ours, range(6))
    run(torch.optim.Muon(theirs, lr=LR, **options), theirs, range(6))
    assert_moved_alike(ours, theirs, start, 1e-9)


@pytest.mark.usefixtures("precise_torch")
def test_training_a_model_equals_torch_muon_and_adamw() -> None:
    """Gradients here depend on the parameters, so that any difference would grow; float64 leaves it no room."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 5)).double()
    twin, moved, start = copy.deepcopy(model), copy.deepcopy(model), copies(model.parameters())
    nudge(moved.parameters(), 10, seed=0)
    again = Muon(get_default_muon_param_groups(moved), lr=LR, scheme="keller")
    ours = Muon(get_default_muon_param_groups(model), lr=LR, scheme="keller")
    matrices = [twin[0].weight, twin[2].weight]  # the last layer is the head
    vectors = [p for p in twin.parameters() if p.dim() == 1]
    theirs: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=LR, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([twin[4].weight], lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True),
        torch.optim.AdamW(vectors, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True),
    ]
    x, y = torch.randn(32, 12, dtype=torch.float64), torch.randn(32, 5, dtype=torch.float64)
    for _ in range(10):
        nn.functional.mse_loss(model(x), y).backward()
        ours.step()
        ours.zero_grad()
        nn.functional.mse_loss(moved(x), y).backward()
        again.step()
        again.zero_grad()
        nn.functional.mse_loss(twin(x), y).backward()
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
    for a, b, other, s in zip(*(one.parameters() for one in (model, twin, moved)), start, strict=True):
        bound = 4 * (other - a).norm().item() / (b - s).norm().item()  # where rounding may lead, relative to the way
        assert bound < 1e-8
        assert_moved_alike([a], [b], [s], bound)


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_torch_as_shipped_within_its_rounding(rule: str, nesterov: bool) -> None:
    """torch computes in bfloat16, we in float32, so one step's updates differ by torch's rounding error.

    The gradients are fixed, so the momenta agree and the parameters' difference is at most the sum of lr·factor·error
    over the steps. For these shapes that is under 15 % of one update, less than what a wrong option does: dropping
    Nesterov changes an update by more than 20 %.
    """
    start = make_params((32, 32), (64, 32), (24, 96), (100, 60))
    ours, theirs = copies(start), copies(start)
    optimizer = muon(ours, nesterov=nesterov, adjust_lr_fn=rule, weight_decay=0.0)
    shipped = torch.optim.Muon(theirs, lr=LR, nesterov=nesterov, adjust_lr_fn=rule, weight_decay=0.0)
    bounds, buffers = [0.0] * len(start), [torch.zeros_like(p, requires_grad=False) for p in start]
    for step in range(10):
        grads = gradients(ours, step)
        set_gradients(ours, grads)
        set_gradients(theirs, grads)
        optimizer.step()
        shipped.step()
        for k, (buffer, grad) in enumerate(zip(buffers, grads, strict=True)):
            buffer.mul_(0.95).add_(grad)
            update = grad + 0.95 * buffer if nesterov else buffer
            lr = LR * FACTORS[rule](*grad.shape)
            error = orthogonalize_error(update, keller(), form="standard", dtype=torch.bfloat16, frobenius=True)
            bounds[k] += lr * error
            assert error < 0.15 * newton_schulz(update, KELLER_5).norm()
            assert (ours[k] - theirs[k]).norm().item() < bounds[k], f"{tuple(grad.shape)} at step {step}"
