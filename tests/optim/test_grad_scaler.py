"""GradScaler: it leaves unscaling to ``step``. tests/integrations has what trainers do with it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from meshmuon import DistMuon, Muon
from tests.support.bounds import unit
from tests.support.reference import LR, Run, gradients, set_gradients
from tests.support.tensors import assert_bits

from .test_nonfinite import groups, snapshot

Scaler = torch.amp.GradScaler


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def optimizer_of(model: nn.Module, **options: Any) -> Muon:
    named = list(model.named_parameters())
    groups = [
        {"params": [one for one in named if (one[1].dim() == 2) is muon], "use_muon": muon} for muon in (True, False)
    ]
    return Muon(groups, lr=LR, **options)


def clip_by_norm(optimizer: torch.optim.Optimizer, most: float) -> None:
    """In the order of the param groups, since the norm is rounded by the order of its summands."""
    nn.utils.clip_grad_norm_([param for group in optimizer.param_groups for param in group["params"]], most)


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    data, target = torch.randn(7, 6, generator=generator), torch.randn(7, 5, generator=generator)
    return nn.functional.mse_loss(model(data), target)


def contents(model: nn.Module, optimizer: Muon) -> list[Tensor]:
    states = [optimizer.state[param] for param in model.parameters()]
    return [*model.parameters(), *(entry[key] for entry in states for key in sorted(entry))]


def unscaled(steps: Sequence[int], clip: float | None = None, *, moved: float = 0.0, seed: int = 0) -> list[Tensor]:
    """Without a scaler; every parameter is first moved by up to ``moved`` of itself."""
    model = network()
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.data *= 1 + moved * (2 * torch.rand(param.shape, generator=generator) - 1)
    optimizer = optimizer_of(model)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if clip is not None:
            clip_by_norm(optimizer, clip)
        optimizer.step()
    return contents(model, optimizer)


def train(
    steps: int, *, clip: float | None = None, bad: int | None = None, **options: Any
) -> tuple[list[Tensor], Scaler, Muon]:
    """With a scaler, as torch's documentation shows; at step 2 the gradient of parameter ``bad`` is infinite."""
    model = network()
    optimizer, scaler = optimizer_of(model, **options), Scaler("cpu", init_scale=2.0**10, growth_interval=3)
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if bad is not None and step == 2:
            grad = list(model.parameters())[bad].grad
            assert grad is not None
            grad.view(-1)[1] = math.inf
        if clip is not None:
            scaler.unscale_(optimizer)
            clip_by_norm(optimizer, clip)
        scaler.step(optimizer)
        scaler.update()
    return contents(model, optimizer), scaler, optimizer


@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
def test_a_scale_that_is_a_power_of_two_changes_no_bit(clip: float | None) -> None:
    """With the scale growing on the way, with and without ``unscale_`` and clipping."""
    found, scaler, optimizer = train(7, clip=clip)
    assert_bits(found, unscaled(range(7), clip))
    assert scaler.get_scale() == 2.0**12
    assert optimizer.skipped_steps == 0
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("policy", ["propagate", "skip", "raise"])
def test_what_a_scaler_finds_is_skipped(policy: str, where: int, clip: float | None, path: str) -> None:
    """Under every policy: the step is left out, the scale halves, and later steps are those of a run without that
    batch.
    """
    found, scaler, optimizer = train(5, clip=clip, bad=where, nonfinite=policy)
    assert optimizer.skipped_steps == 1
    assert scaler.get_scale() == 2.0**9
    assert [float(entry["step"]) for entry in optimizer.state.values() if "step" in entry] == [4.0, 4.0]
    wanted = unscaled([0, 1, 3, 4], clip)
    if path == "host":
        assert_bits(found, wanted)
        return
    # Each of the four steps rounds about ten times. So much at once, at the beginning, shows how far it may lead.
    moved = [unscaled([0, 1, 3, 4], clip, moved=4 * 10 * unit(torch.float32), seed=seed) for seed in range(4)]
    for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert (a - b).norm().item() <= max((one[k] - b).norm().item() for one in moved), k


def test_a_found_infinity_leaves_every_bit(path: str) -> None:
    run = Run(groups())
    run.step(0)
    before = snapshot(run.everything())
    scaler = Scaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    grads = gradients(run.params, 1)
    grads[0][0, 0] = math.inf
    set_gradients(run.params, grads)
    scaler.step(run.optimizer)
    scaler.update()
    assert_bits(run.everything(), before)
    assert (scaler.get_scale(), run.optimizer.skipped_steps) == (2.0, 1)


@pytest.mark.parametrize("before", [False, True])
def test_a_scaler_that_meets_no_gradient(before: bool, path: str) -> None:
    run = Run(groups())
    scaler = Scaler("cpu")
    scaler.scale(torch.ones(()))
    start = snapshot(run.params)
    if before:
        scaler.unscale_(run.optimizer)
    scaler.step(run.optimizer)
    assert_bits(run.params, start)
    assert run.optimizer.skipped_steps == 0


def test_half_precision_gradients_are_unscaled(path: str) -> None:
    """float16 parameters, which ``unscale_`` refuses but a scaler's step() does not."""
    run, expected = Run(groups(torch.float16)), Run(groups(torch.float16))
    scaler = Scaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    for step in range(3):
        set_gradients(run.params, [grad * 4 for grad in gradients(run.params, step)])
        scaler.step(run.optimizer)
        scaler.update()
        expected.step(step)
    assert_bits(run.params[3:], expected.params[3:])
    for a, b in zip(run.params[:3], expected.params[:3], strict=True):
        # Formed in float32 and rounded once a step, now and then to the other side: twice the unit each time.
        assert bool(((a - b).abs() <= 3 * 2 * unit(torch.float16) * (b.abs() + 0.1)).all())


class Sharded(Scaler):
    """A scaler with a step of its own, like those of other libraries."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        return super().step(optimizer, *args, **kwargs)


@pytest.mark.parametrize("kind", [Scaler, Sharded])
def test_a_scaler_leaves_unscaling_to_the_step(kind: type[Scaler]) -> None:
    """It neither unscales nor reads what it found: the host does not wait. Fails if torch asks in another way."""
    model = network()
    optimizer, scaler = optimizer_of(model), kind("cpu", init_scale=2.0**10)
    for step in range(3):
        scaler.scale(loss_of(model, step)).backward()
        with (
            patch.object(scaler, "unscale_", side_effect=AssertionError("the scaler unscales")),
            patch.object(scaler, "_maybe_opt_step", side_effect=AssertionError("the host reads what was found")),
        ):
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert_bits(contents(model, optimizer), unscaled(range(3)))


@pytest.mark.parametrize("kind", [Muon, DistMuon])
def test_scalers_that_are_not_torchs_and_trainers_are_told_to_unscale_themselves(kind: type[Muon]) -> None:
    """Also by a copy; a scaler of another library does everything itself, as with any optimizer."""
    optimizer = kind([{"params": [nn.Parameter(torch.ones(3, 2))], "use_muon": True}])
    for one in (optimizer, copy.deepcopy(optimizer)):
        assert getattr(one, "_step_supports_amp_scaling", False) is False
