"""``muon_for``: an optimizer from a module, for trainers that hand over parameters without names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshmuon import ConfigError, Muon, get_default_muon_param_groups
from meshmuon.integrations.factory import muon_for


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"embed": nn.Embedding(6, 8), "up": nn.Linear(8, 12), "norm": nn.LayerNorm(12), "conv": nn.Conv2d(3, 4, 2)}
    )


def test_it_is_muon_of_the_default_groups() -> None:
    ours, theirs = model(), model()
    optimizers = muon_for(ours, lr=1e-3, momentum=0.5), Muon(get_default_muon_param_groups(theirs), lr=1e-3, momentum=0.5)
    for built, optimizer in zip((ours, theirs), optimizers, strict=True):
        for param in built.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert str(optimizers[0]) == str(optimizers[1])


def test_options_of_the_default_groups_are_passed_on() -> None:
    assert _route(muon_for(model(), conv="flatten"), "conv.weight")
    assert not _route(muon_for(model()), "conv.weight")
    assert not _route(muon_for(model(), is_muon_func=lambda name, param: "conv" in name, conv="flatten"), "up.weight")


def _route(optimizer: Muon, name: str) -> bool:
    (use_muon,) = [group["use_muon"] for group in optimizer.param_groups if name in group["param_names"]]
    return bool(use_muon)


def test_names_of_trainers_are_understood() -> None:
    group = muon_for(model(), betas=[0.5, 0.75], eps=1e-3).param_groups[-1]
    assert (list(group["adamw_betas"]), group["adamw_eps"]) == ([0.5, 0.75], 1e-3)
    with pytest.raises(ConfigError, match="eps=1e-08 and adamw_eps=1e-06 are two names of one option: give adamw_eps only"):
        muon_for(model(), eps=1e-8, adamw_eps=1e-6)


def test_parameters_that_do_not_decay() -> None:
    optimizer = muon_for(model(), weight_decay=0.5, decays=lambda name: name.endswith("weight") and "norm" not in name)
    decay = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert {name for name in decay if decay[name] == 0.5} == {"embed.weight", "up.weight", "conv.weight"}
    assert {name for name in decay if decay[name] == 0.0} == {"up.bias", "norm.weight", "norm.bias", "conv.bias"}


def test_parameters_without_names_lead_to_the_factory() -> None:
    """verl and NeMo Automodel call an optimizer class with a generator or a list of parameters."""
    for params in (model().parameters(), list(model().parameters())):
        with pytest.raises(ConfigError, match=r"muon_for\(model, lr=\.\.\.\) of meshmuon\.integrations\.factory"):
            Muon(params, lr=1e-3)  # type: ignore[arg-type]
