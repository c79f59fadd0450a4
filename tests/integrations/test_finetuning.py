"""Gradual unfreezing by Lightning's ``BaseFinetuning``: one module more in every epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from meshmuon import ConfigError, Muon

from ..support.optional import need
from ..support.tensors import same, seeded

need("lightning")

import lightning
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint

from meshmuon.integrations.lightning import MuonMonitor, muon

WIDTH, EPOCHS, LR = 8, 4, 2e-3
pytestmark = [
    # Lightning's; they train all the same
    pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist"),
    pytest.mark.filterwarnings("ignore:.*(num_workers|does not have many workers|fewer than the logging)"),
]


class Net(nn.Module):
    """A backbone of two blocks under a neck of one matrix and an output head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2))
        self.neck, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        with torch.no_grad():
            for k, param in enumerate(self.parameters()):
                param.copy_(seeded(param.shape, k))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: Tensor = self.head(torch.tanh(self.neck(x)))
        return out


class Module(lightning.LightningModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.net, self.options = Net(), options

    def training_step(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()

    def configure_optimizers(self) -> Muon:
        assert not any(param.requires_grad for param in self.net.blocks.parameters())
        return muon(self, lr=LR, **self.options)


class Gradual(BaseFinetuning):
    """Block 1 trains from epoch 1 on, block 0 from epoch 2 on."""

    def __init__(self, neck: bool = False) -> None:
        super().__init__()
        self.neck = neck

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([*pl_module.net.blocks, *([pl_module.net.neck] if self.neck else [])])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        for first, block in ((1, 1), (2, 0)):
            if epoch == first or (epoch > first and self._was_resumed(pl_module)):
                self.unfreeze_and_add_param_group(pl_module.net.blocks[block], optimizer)
                if self.neck:
                    self.unfreeze_and_add_param_group(pl_module.net.neck, optimizer)

    def _was_resumed(self, pl_module: Any) -> bool:
        return any(not param.requires_grad for param in pl_module.net.parameters())


def data() -> list[Tensor]:
    return list(seeded((6, WIDTH), 77).split(1))


def fit(module: Module, callback: BaseFinetuning, folder: Path | None = None, checkpoint: Path | None = None) -> Module:
    saves = [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)] if folder else []
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=folder is not None, callbacks=[callback, MuonMonitor(), *saves],
    )  # fmt: skip
    trainer.fit(module, DataLoader(data(), batch_size=None), ckpt_path=None if checkpoint is None else str(checkpoint))
    return module


def plainly(neck: bool = False) -> Net:
    """The same without a trainer, by an optimizer that had all parameters from the start and no gradients for some."""
    net = Net()
    optimizer = Muon(net, lr=LR, allow_inactive=True)
    for epoch in range(EPOCHS):
        idle = [*(net.blocks[1].parameters() if epoch < 1 else ()), *(net.blocks[0].parameters() if epoch < 2 else ())]
        idle += net.neck.parameters() if neck and epoch < 1 else ()
        for batch in data():
            net(batch).square().mean().backward()
            for param in idle:
                param.grad = None
            optimizer.step()
            optimizer.zero_grad()
    return net


def assert_same(module: Module, expected: Net) -> None:
    for (name, param), other in zip(module.net.named_parameters(), expected.parameters(), strict=True):
        same(param.detach(), other.detach(), name)


def test_gradual_unfreezing_and_resuming(tmp_path: Path) -> None:
    """Resumed before, between and after the epochs in which modules are unfrozen."""
    expected = plainly()
    assert_same(fit(Module(), Gradual(), tmp_path), expected)
    for epoch in range(EPOCHS - 1):
        assert_same(fit(Module(), Gradual(), checkpoint=tmp_path / f"epoch={epoch}.ckpt"), expected)


def test_all_matrices_are_frozen_at_first() -> None:
    """Refused in words that name the way to allow it."""
    with pytest.raises(
        ConfigError, match=r"frozen \(requires_grad=False\).*as in gradual unfreezing, pass allow_inactive=True"
    ):
        fit(Module(), Gradual(neck=True))
    assert_same(fit(Module(allow_inactive=True), Gradual(neck=True)), plainly(neck=True))


class OfTheHead(Module):
    def configure_optimizers(self) -> Muon:
        return muon(nn.ModuleDict({"neck": self.net.neck, "head": self.net.head}), lr=LR)


def test_an_optimizer_without_the_frozen_parameters() -> None:
    """Lightning then adds a group without names or routes, which is refused with what to write."""
    with pytest.raises(
        ConfigError, match=r"BaseFinetuning.*build the optimizer with the whole model.*keeps frozen parameters"
    ):
        fit(OfTheHead(), Gradual())
