"""What docs/trainers_hf.md shows for trainers that are not installed here, run against stand-ins that make their calls.

The stand-ins repeat what the sources of axolotl, verl and NeMo Automodel do around the optimizer, in their order.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from meshmuon import Muon, get_default_muon_param_groups
from tests.support.optional import need

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainers_hf.md"


def recipe(package: str) -> str:
    """The block of the page that imports the package."""
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if f"from {package}" in block]
    return str(block)


def run_recipe(package: str, module: str, monkeypatch: pytest.MonkeyPatch, **names: Any) -> dict[str, Any]:
    """Runs it with a stand-in for the module that it imports; returns what it defines."""
    parts = module.split(".")
    for k in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:k]), ModuleType(".".join(parts[:k])))
    for name, value in names.items():
        setattr(sys.modules[module], name, value)
    defined: dict[str, Any] = {"__name__": "recipe"}
    monkeypatch.setitem(sys.modules, "recipe", ModuleType("recipe"))  # dataclasses look their module up
    exec(compile(recipe(package), str(PAGE), "exec"), defined)
    return defined


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 12))


def losses(model: nn.Module, steps: int = 3) -> Iterator[torch.Tensor]:
    tokens = torch.arange(12).reshape(2, 6)
    for _ in range(steps):
        yield nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())


def plain_loop(**options: Any) -> list[nn.Parameter]:
    model = net()
    optimizer = Muon(get_default_muon_param_groups(model), **options)
    for loss in losses(model):
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def assert_same(model: nn.Module, expected: list[nn.Parameter]) -> None:
    assert all(torch.equal(param, other) for param, other in zip(model.parameters(), expected, strict=True))


def test_axolotl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin sets the factory; ``OptimizerMixin.create_optimizer`` makes an instance and calls it with its arguments."""
    transformers = need("transformers")

    class BasePlugin:
        pass

    defined = run_recipe("axolotl", "axolotl.integrations.base", monkeypatch, BasePlugin=BasePlugin)
    args = transformers.TrainingArguments("unused", use_cpu=True, learning_rate=2e-3, weight_decay=0.25, report_to="none")
    trainer = SimpleNamespace(optimizer=None, optimizer_cls_and_kwargs=None, model=net(), args=args)
    defined["MeshmuonPlugin"]().post_trainer_create({}, trainer)
    factory, options = trainer.optimizer_cls_and_kwargs
    assert not (isinstance(factory, type) and issubclass(factory, torch.optim.Optimizer))  # what axolotl asks of a factory
    optimizer = factory()(trainer.model, trainer.args, **options)
    assert isinstance(optimizer, Muon)
    assert {group["lr"] for group in optimizer.param_groups} == {2e-3}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.25, 0.0}


def test_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """``FSDPEngine``: build after sharding, offload and load state by hand, clip, skip or step, schedule by LambdaLR."""

    class FSDPEngine:
        _build_optimizer: Callable[[Any, nn.Module], torch.optim.Optimizer]

        def __init__(self, module: nn.Module) -> None:
            self.optimizer_config = SimpleNamespace(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), clip_grad=1.0)
            self.module, self.optimizer = module, self._build_optimizer(module)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)

        def move_state(self, device: str) -> None:
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    state = self.optimizer.state[param]
                    state.update({k: v.to(device, non_blocking=True) for k, v in state.items() if isinstance(v, torch.Tensor)})

        def train_batch(self, loss: torch.Tensor) -> None:
            self.move_state("cpu")
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.optimizer_config.clip_grad)
            if norm.isfinite():
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.lr_scheduler.step()
            self.move_state("cpu")

    run_recipe("verl", "verl.workers.engine.fsdp.transformer_impl", monkeypatch, FSDPEngine=FSDPEngine)
    engine = FSDPEngine(net())
    for loss in losses(engine.module):
        engine.train_batch(loss)
    assert_same(engine.module, plain_loop(lr=1e-3, weight_decay=0.1, adamw_betas=(0.9, 0.95)))


def test_nemo_automodel(monkeypatch: pytest.MonkeyPatch) -> None:
    """``build_optimizer``: the config is made from the YAML's options, and builds one optimizer per part of the model."""

    @dataclass
    class OptimizerConfig:
        supports_megatron_fsdp_sharding: ClassVar[bool] = True
        param_group_overrides: list[Any] = field(default_factory=list)

    module = "nemo_automodel.components.optim.optimizer"
    config_class = run_recipe("nemo_automodel", module, monkeypatch, OptimizerConfig=OptimizerConfig)["MeshmuonConfig"]
    config = config_class(lr=1e-3)
    assert not config.supports_megatron_fsdp_sharding
    model = net()
    (optimizer,) = config.build(model, device_mesh=None, is_peft=False)
    for loss in losses(model):
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, plain_loop(lr=1e-3))
    stages = SimpleNamespace(parts=[net(), net()])
    assert len(config.build(stages, device_mesh=None, is_peft=False)) == 2
