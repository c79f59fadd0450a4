"""``muon_for``: an optimizer from a module, for trainers that hand over parameters without names."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from meshmuon import ConfigError, Muon, RoutingWarning, get_default_muon_param_groups
from meshmuon.integrations.factory import muon_for


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"embed": nn.Embedding(6, 8), "up": nn.Linear(8, 12), "norm": nn.LayerNorm(12), "conv": nn.Conv2d(3, 4, 2)}
    )


def test_it_is_muon_of_the_default_groups() -> None:
    ours, theirs = model(), model()
    optimizers = (
        muon_for(ours, lr=1e-3, momentum=0.5),
        Muon(get_default_muon_param_groups(theirs), lr=1e-3, momentum=0.5),
    )
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
    with pytest.raises(
        ConfigError, match="adamw_eps=1e-06 and eps=1e-08 are two names of one option: give adamw_eps only"
    ):
        muon_for(model(), eps=1e-8, adamw_eps=1e-6)


def test_further_keys_of_groups() -> None:
    """Equal keys share a group; each group of the default stays apart; parameters without keys come first."""
    keys = {"up.weight": {"lr": 1e-4}, "embed.weight": {"lr": 1e-4, "mark": 1}, "norm.weight": {"mark": 1, "lr": 1e-4}}
    optimizer = muon_for(model(), lr=1e-3, conv="flatten", keys=lambda name: keys.get(name, {}))
    groups = [
        (group["use_muon"], group["lr"], group.get("mark"), list(group["param_names"]))
        for group in optimizer.param_groups
    ]
    assert groups == [
        (True, 1e-3, None, ["conv.weight"]),
        (True, 1e-4, None, ["up.weight"]),
        (False, 1e-4, 1, ["embed.weight"]),
        (False, 1e-3, None, ["up.bias", "norm.bias", "conv.bias"]),
        (False, 1e-4, 1, ["norm.weight"]),
    ]


def test_keys_that_are_not_for_them() -> None:
    with pytest.raises(ConfigError, match=r"keys\('up\.weight'\): use_muon is decided by get_default"):
        muon_for(model(), keys=lambda name: {"use_muon": False})


def test_a_configuration_can_name_it() -> None:
    """As verl's page says and verl does: ``getattr(import_module(optimizer_impl), optimizer)(module.parameters(),
    ...)``.
    """
    page = (Path(__file__).resolve().parents[2] / "docs" / "trainers_hf.md").read_text()
    (named,) = re.findall(r"`optimizer_impl: (\S+)`, `optimizer: (\S+)`", page)
    make = getattr(importlib.import_module(named[0]), named[1])
    net = model()
    assert str(make(net.parameters(), lr=1e-3, weight_decay=0.1)) == str(muon_for(net, lr=1e-3, weight_decay=0.1))


def test_parameters_that_lead_to_no_module_are_refused() -> None:
    """``module_behind`` has tests of its own."""
    net = model()
    message = r"does not say which module it is from, or may be only a part of its parameters; .*call requires_grad_"
    for parameters in (list(net.parameters()), net.parameters(recurse=False)):
        with pytest.raises(ConfigError, match=message):
            muon_for(parameters, lr=1e-3)  # type: ignore[arg-type]


def test_parameters_without_names_lead_to_the_factory() -> None:
    """Some trainers call an optimizer class with a generator or a list of parameters."""
    for params in (model().parameters(), list(model().parameters())):
        with pytest.raises(ConfigError, match=r"muon_for\(model, lr=\.\.\.\) of meshmuon\.integrations\.factory"):
            Muon(params, lr=1e-3)  # type: ignore[arg-type]


def test_warnings_point_at_the_call_of_the_user() -> None:
    with pytest.warns(RoutingWarning, match="moves entries by") as caught:
        muon_for(model(), lr=0.5)
    assert [warning.filename for warning in caught] == [__file__]
