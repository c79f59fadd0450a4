"""Who unscales gradients: a GradScaler leaves it to ``step``, and a trainer that clips does it before, as its check allows.

Lightning is not installed here. What its mixed precision does is written down below: it reads one attribute of the optimizer,
``getattr(optimizer, "_step_supports_amp_scaling", False)``, refuses to clip where that is true, and otherwise unscales
before clipping.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from meshmuon import DistMuon, Muon

from .test_nonfinite import assert_bits, clip_by_norm, contents, loss_of, network, optimizer_of, snapshot, unscaled

BAD_STEP = 2


class Trainer:
    """What Lightning does with ``precision="16-mixed"`` and ``gradient_clip_val``."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler

    def handles_unscaling(self, optimizer: torch.optim.Optimizer) -> bool:
        return getattr(optimizer, "_step_supports_amp_scaling", False)

    def clip(self, optimizer: torch.optim.Optimizer, most: float) -> None:
        if self.handles_unscaling(optimizer):
            raise RuntimeError("the current optimizer does not allow for gradient clipping")
        clip_by_norm(optimizer, most)

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
        if self.scaler is not None and not self.handles_unscaling(optimizer):
            self.scaler.unscale_(optimizer)
        if clip is not None:
            self.clip(optimizer, clip)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()


def scaler_of(kind: type[torch.amp.GradScaler] = torch.amp.GradScaler) -> torch.amp.GradScaler:
    return kind("cpu", init_scale=2.0**10, growth_interval=100)


def train(trainer: Trainer, steps: Sequence[int], clip: float | None, *, bad: bool = False) -> tuple[list[Tensor], Muon]:
    model = network()
    optimizer = optimizer_of(model)
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        (loss if trainer.scaler is None else trainer.scaler.scale(loss)).backward()
        if bad and step == BAD_STEP:
            model[0].weight.grad[0, 0] = torch.inf
            before = snapshot(contents(model, optimizer))
        trainer.step(optimizer, clip)
        if bad and step == BAD_STEP:
            assert_bits(contents(model, optimizer), before)
    return contents(model, optimizer), optimizer


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_trainer_that_clips(clip: float | None, scaled: bool) -> None:
    """The bits of a run without scaler and trainer."""
    found, _ = train(Trainer(scaler_of() if scaled else None), range(5), clip)
    assert_bits(found, unscaled(range(5), clip))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_trainer_that_meets_an_infinity(clip: float | None) -> None:
    """It is this optimizer that leaves the step out, for all ranks at once and without reading the device."""
    trainer = Trainer(scaler_of())
    found, optimizer = train(trainer, range(5), clip, bad=True)
    assert_bits(found, unscaled([step for step in range(5) if step != BAD_STEP], clip))
    assert optimizer.skipped_steps == 1
    assert trainer.scaler is not None
    assert trainer.scaler.get_scale() == 2.0**9


class Sharded(torch.amp.GradScaler):
    """A scaler with a step of its own, like those of other libraries."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        return super().step(optimizer, *args, **kwargs)


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, Sharded])
def test_a_scaler_leaves_unscaling_to_the_step(kind: type[torch.amp.GradScaler]) -> None:
    """It neither unscales nor reads what it found: the host does not wait. Fails if torch asks in another way."""
    model = network()
    optimizer, scaler = optimizer_of(model), scaler_of(kind)
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


class Own:
    """A scaler that is not torch's: it does everything itself, as with any optimizer."""

    scale = 8.0

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            raise AssertionError("gradients would stay scaled")
        gradients = [param.grad for group in optimizer.param_groups for param in group["params"]]
        if not all(bool(grad.isfinite().all()) for grad in gradients):
            return False
        for grad in gradients:
            grad.div_(self.scale)
        optimizer.step()
        return True


def test_a_scaler_that_is_not_torchs() -> None:
    model = network()
    optimizer, scaler = optimizer_of(model), Own()
    for step in range(4):
        optimizer.zero_grad()
        (scaler.scale * loss_of(model, step)).backward()
        if step == BAD_STEP:
            model[2].bias.grad[0] = torch.nan
        assert scaler.step(optimizer) is (step != BAD_STEP)
    assert_bits(contents(model, optimizer), unscaled([0, 1, 3]))


@pytest.mark.parametrize("kind", [Muon, DistMuon])
def test_copies_answer_alike(kind: type[Muon]) -> None:
    optimizer = kind([{"params": [nn.Parameter(torch.ones(3, 2))], "use_muon": True}])
    for one in (optimizer, copy.deepcopy(optimizer)):
        assert Trainer(None).handles_unscaling(one) is False
