"""Wrong arguments of public functions get an error of the package that says what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshmuon import ConfigError, DistMuon, Muon, clip_grad_norm_, get_default_muon_param_groups, total_grad_norm
from meshmuon.integrations.factory import muon_for
from tests.support.optional import need

LAZY = "is not initialised yet: it belongs to a lazy module, such as nn.LazyLinear"


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(16), nn.Linear(16, 8))


def weight() -> list[nn.Parameter]:
    return list(lazy().parameters())[:1]


def anything(value: Any) -> Any:
    return value


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "lazy model": (lambda: get_default_muon_param_groups(lazy()), f"0.weight {LAZY}"),
    "lazy model, own choice": (
        lambda: get_default_muon_param_groups(lazy(), lambda name, param: True),
        f"0.weight {LAZY}",
    ),
    "lazy groups": (lambda: Muon([{"params": weight(), "names": ["w"], "use_muon": True}]), f"w {LAZY}"),
    "lazy in AdamW": (lambda: Muon([{"params": weight(), "names": ["w"], "use_muon": False}]), f"w {LAZY}"),
    "lazy in DistMuon": (lambda: DistMuon(weight()), f"group0.param0 {LAZY}"),
    "lazy clip": (lambda: clip_grad_norm_(weight(), 1.0), f"parameter 0 {LAZY}"),
    "clip None": (
        lambda: clip_grad_norm_(anything(None), 1.0),
        "parameters=None must be tensors. Pass model.parameters()",
    ),
    "clip number": (lambda: clip_grad_norm_(anything(3), 1.0), "parameters=3 must be tensors. Pass model.parameters()"),
    "clip class": (lambda: clip_grad_norm_(anything(Muon), 1.0), "must be tensors. Pass model.parameters()"),
    "clip by None": (
        lambda: clip_grad_norm_(net().parameters(), anything(None)),
        "max_norm is None; it must be a number",
    ),
    "norm of None": (
        lambda: total_grad_norm(anything(None)),
        "parameters=None must be tensors. Pass model.parameters()",
    ),
    "no module": (lambda: muon_for(anything(None)), "model is a NoneType, which does not say which module it is from"),
    "keys": (lambda: muon_for(net(), keys=anything("bias")), "keys='bias' must be a function of a parameter's name"),
    "keys that raise": (
        lambda: muon_for(net(), keys=lambda name: {name: 1 / 0}),
        "keys failed for 0.weight with ZeroDivision",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(ConfigError, match=re.escape(message)):
        call()


def test_a_lazy_model_is_fine_after_its_first_pass() -> None:
    model = lazy()
    model(torch.ones(2, 6))
    assert muon_for(model).param_groups[0]["param_names"] == ["0.weight"]


def test_refused_by_the_factory_for_trainer() -> None:
    need("transformers")
    from meshmuon.integrations.hf import muon

    with pytest.raises(ConfigError, match=r"training_args=\{'learning_rate': 0.001\} must be the TrainingArguments"):
        muon()(net(), anything({"learning_rate": 1e-3}))
    with pytest.raises(ConfigError, match="model is a list"):
        muon()(anything(list(net().parameters())), lr=1e-3)


def test_refused_by_the_factory_for_lightning() -> None:
    need("lightning")
    from meshmuon.integrations.lightning import MuonMonitor, metrics_of, muon

    with pytest.raises(ConfigError, match="module is a NoneType; it must be the LightningModule"):
        muon(anything(None), lr=1e-3)
    with pytest.raises(ConfigError, match=r"fabric=3 must be the launched lightning\.Fabric"):
        muon(net(), anything(3), lr=1e-3)
    with pytest.raises(ConfigError, match="every_n_steps=True must be a whole number"):
        MuonMonitor(every_n_steps=True)
    with pytest.raises(ConfigError, match=r"optimizer is a AdamW; metrics_of reads those of a meshmuon\.Muon"):
        metrics_of(anything(torch.optim.AdamW(net().parameters())))


def test_refused_by_the_config_for_torchtitan() -> None:
    need("torchtitan")
    from meshmuon.integrations.torchtitan import MuonContainer, muon

    with pytest.raises(ConfigError, match=r"momentun=0.9 is not an option of Muon"):
        MuonContainer(muon(momentun=0.9), model_parts=[net()])
    with pytest.raises(ConfigError, match="options=3 must be a dict of further options of Muon"):
        MuonContainer(MuonContainer.Config(options=anything(3)), model_parts=[net()])
