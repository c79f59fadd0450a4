"""What docs/trainers_hf.md shows for axolotl, verl and NeMo Automodel, called as they do; ``real`` has the packages."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from meshmuon import ConfigError, Muon, UnsupportedError, get_default_muon_param_groups
from tests.support.optional import need

yaml = need("yaml")
DOCS = Path(__file__).resolve().parents[2] / "docs"


def recipe(module: str) -> dict[str, Any]:
    """The block of the page that names the module of meshmuon.integrations, as a trainer reads it."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (DOCS / "trainers_hf.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if f"meshmuon.integrations.{module}" in block]
    return dict(yaml.safe_load(block))


def named(path: str) -> Any:
    """The object behind a dotted path, as all three trainers find it."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def stand_in(monkeypatch: pytest.MonkeyPatch, adapter: str, module: str, **names: Any) -> None:
    """Puts a module of a trainer into place for the adapter that imports it."""
    parts = module.split(".")
    for k in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:k]), ModuleType(".".join(parts[:k])))
    for name, value in names.items():
        setattr(sys.modules[module], name, value)
    monkeypatch.delitem(sys.modules, f"meshmuon.integrations.{adapter}", raising=False)
    importlib.import_module(f"meshmuon.integrations.{adapter}")
    monkeypatch.setitem(
        sys.modules, f"meshmuon.integrations.{adapter}", sys.modules[f"meshmuon.integrations.{adapter}"]
    )


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 12))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    tokens = torch.arange(12).reshape(2, 6)
    for _ in range(3):
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def assert_trains_as_muon(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    plain = net()
    expected = trained(plain, Muon(get_default_muon_param_groups(plain), **options))
    assert all(map(torch.equal, trained(model, optimizer), expected))


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    need("transformers")
    need("accelerate")  # without which transformers has no TrainingArguments

    class BasePlugin:
        pass

    stand_in(monkeypatch, "axolotl", "axolotl.integrations.base", BasePlugin=BasePlugin)
    (path,) = recipe("axolotl")["plugins"]
    return named(path)()


def axolotl_trainer(**arguments: Any) -> SimpleNamespace:
    args = need("transformers").TrainingArguments(
        "unused", use_cpu=True, report_to="none", learning_rate=2e-3, weight_decay=0.25
    )
    vars(args).update(arguments)
    callbacks: list[Any] = []
    return SimpleNamespace(
        optimizer_cls_and_kwargs=None, model=net(), args=args, callbacks=callbacks, add_callback=callbacks.append
    )


def test_axolotl(plugin: Any) -> None:
    """The plugin sets the factory; ``OptimizerMixin.create_optimizer`` makes an instance and calls it with its
    arguments.
    """
    trainer = axolotl_trainer()
    plugin.post_trainer_create({"optim_args": {"momentum": 0.5}}, trainer)
    factory, options = trainer.optimizer_cls_and_kwargs
    # what axolotl asks of a factory
    assert not (isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer))
    optimizer = factory()(trainer.model, trainer.args, **options)
    assert isinstance(optimizer, Muon)
    assert {group["lr"] for group in optimizer.param_groups} == {2e-3}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.25, 0.0}
    assert {group["momentum"] for group in optimizer.param_groups} == {0.5}
    (callback,) = trainer.callbacks
    callback.on_train_begin(trainer.args, None, None, optimizer=SimpleNamespace(optimizer=optimizer))
    assert optimizer.plan()


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ("momentum=0.5", {}, "optim_args='momentum=0.5' must be a dict of options of Muon"),
        ({"momentun": 0.5}, {}, "did you mean momentum"),
        ({1: 2}, {}, "1=2 is not an option of Muon"),
        ({}, {"embedding_lr": 0.1}, r"embedding_lr=0.1 is for axolotl's own param groups.*remove embedding_lr"),
    ],
)
def test_axolotl_does_not_ignore_what_it_cannot_do(plugin: Any, options: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plugin.post_trainer_create({"optim_args": options}, axolotl_trainer(**arguments))


def test_verl() -> None:
    """``build_optimizer`` of its engine: the betas are passed because the name of the class contains "adam"."""
    config, model = recipe("verl")["optim"], net()
    assert "adam" in config["optimizer"].lower()
    make: Callable[..., torch.optim.Optimizer] = named(f"{config['optimizer_impl']}.{config['optimizer']}")
    options = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.99), **config["override_optimizer_config"]}
    optimizer = make(model.parameters(), **options)
    assert isinstance(optimizer, Muon)
    assert optimizer.plan()  # it is prepared
    assert_trains_as_muon(model, optimizer, lr=1e-3, weight_decay=0.1, adamw_betas=(0.9, 0.99), momentum=0.95)


def test_verl_needs_the_module_behind_the_parameters() -> None:
    """``module_behind`` has tests of its own for what does not lead to a module, or may be a part of its parameters."""
    make: Callable[..., torch.optim.Optimizer] = named("meshmuon.integrations.verl.muon_adamw")
    model = net()
    assert str(make(model, lr=1e-3)) == str(make(model.parameters(), lr=1e-3))
    for parameters in (list(model.parameters()), model.parameters(recurse=False)):
        message = (
            r"does not say which module it is from, or may be only a part of its parameters; .*call requires_grad_"
        )
        with pytest.raises(ConfigError, match=message):
            make(parameters, lr=1e-3)
    with pytest.raises(ConfigError, match="model=1 is not an option of Muon"):
        make(model.parameters(), model=1)


@pytest.fixture
def automodel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes the config as ``build_optimizer_config`` does: from the options of the YAML and some more."""

    @dataclass
    class OptimizerConfig:
        supports_megatron_fsdp_sharding: ClassVar[bool] = True
        param_group_overrides: list[Any] = field(default_factory=list)

        def __post_init__(self) -> None:
            self.param_group_overrides = [SimpleNamespace(**override) for override in self.param_group_overrides]

    stand_in(monkeypatch, "automodel", "nemo_automodel.components.optim.optimizer", OptimizerConfig=OptimizerConfig)
    options = recipe("automodel")["optimizer"]
    options["lr"] = float(options["lr"])  # YAML 1.1 reads 1e-3 as text; Automodel's loader makes it a number
    target = named(options.pop("_target_"))
    return lambda **further: target(**options, **further)


def test_nemo_automodel(automodel: Callable[..., Any]) -> None:
    """``build_optimizer``: the config builds one optimizer per part of the model."""
    config = automodel()
    assert not config.supports_megatron_fsdp_sharding
    model = net()
    (optimizer,) = config.build(model, device_mesh=None, is_peft=False)
    assert optimizer.plan()  # it is prepared
    assert_trains_as_muon(model, optimizer, lr=1e-3, weight_decay=0.1)
    stages = SimpleNamespace(parts=[net(), net()])
    assert len(config.build(stages, device_mesh=None, is_peft=False)) == 2


BIASES = {"1.bias", "3.bias", "4.bias"}


def test_nemo_automodels_overrides_reach_the_groups(automodel: Callable[..., Any]) -> None:
    overrides = [
        {"pattern": r"\.bias$", "lr_mult": 1.0, "wd_mult": 0.0},
        {"pattern": "3", "lr_mult": 0.5, "wd_mult": 1.0},
    ]
    (optimizer,) = automodel(param_group_overrides=overrides).build(net())
    found = {name: group.get("lr_mult") for group in optimizer.param_groups for name in group["param_names"]}
    assert found == {
        "1.weight": None,
        "3.weight": 0.5,
        "0.weight": None,
        "4.weight": None,
        **dict.fromkeys(BIASES, 1.0),
    }
    assert {group["wd_mult"] for group in optimizer.param_groups if set(group["param_names"]) <= BIASES} == {0.0}


def test_nemo_automodels_groups_without_names_are_refused(automodel: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match="makes param groups without names"):
        automodel().build_from_param_groups([{"params": list(net().parameters())}])
