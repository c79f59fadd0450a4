"""A loop that a user writes: averaged weights, and gradients that stay in place or are freed."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from meshmuon import Muon, get_default_muon_param_groups
from tests.support.reference import assert_same_bits


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))


def backward(model: nn.Module, step: int) -> None:
    model(torch.full((2, 6), 1.0 + step)).square().mean().backward()


def test_averaged_weights() -> None:
    """torch's EMA sees every step: its weights are the average of the model's, written plainly."""
    model = net()
    optimizer = Muon(get_default_muon_param_groups(model), lr=0.005)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    expected = [param.detach().clone() for param in model.parameters()]
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        if step == 0:  # the first update copies
            expected = [param.detach().clone() for param in model.parameters()]
        else:
            expected = [old.lerp(param.detach(), 0.1) for old, param in zip(expected, model.parameters(), strict=True)]
    torch.testing.assert_close(list(averaged.module.parameters()), expected)


def test_gradients_that_stay_in_place() -> None:
    """As captured CUDA graphs need them. The default frees Muon's gradients, whatever ``set_to_none`` says."""
    models = net(), net()
    kept, freed = (
        Muon(get_default_muon_param_groups(model), lr=0.005, none_grad=none_grad)
        for model, none_grad in zip(models, (False, True), strict=True)
    )
    addresses = set()
    for step in range(3):
        for model, optimizer in zip(models, (kept, freed), strict=True):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert all(param.grad is not None and not param.grad.any() for param in models[0].parameters())
        assert models[1][0].weight.grad is None  # Muon's
        assert models[1][0].bias.grad is not None  # AdamW's
        addresses.add(tuple(param.grad.data_ptr() for param in models[0].parameters() if param.grad is not None))
    assert len(addresses) == 1
    assert_same_bits(list(models[0].parameters()), list(models[1].parameters()))
