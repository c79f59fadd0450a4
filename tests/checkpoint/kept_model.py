"""The model of the checkpoints in ``kept.tar.xz``, which were written when param groups left out frozen parameters.

Recipe: at commit 0e555b00, ``write(folder)`` and ``tar -C folder -cJf kept.tar.xz plain.pt dcp flat``.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from meshmuon import Muon
from tests.support.tensors import like, seeded

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    """An embedding, which alone has weight decay from AdamW, and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2))
        with torch.no_grad():
            for k, param in enumerate(self.parameters()):
                param.copy_(seeded(param.shape, k))


def freeze(model: Net, frozen: bool = True) -> Net:
    model.embed.requires_grad_(not frozen)
    model.blocks[0].requires_grad_(not frozen)
    return model


def kept_model() -> Net:
    """As it was saved: the embedding and the first block are frozen."""
    return freeze(Net())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        for k, param in enumerate(model.parameters()):
            param.grad = like(param, seeded(param.shape, 1000 + 100 * step + k)) if param.requires_grad else None
        optimizer.step()


def write(folder: Path) -> None:
    model = kept_model()
    optimizer = Muon(model, lr=2e-3, momentum=0.9)
    train(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "plain.pt")
    for name, options in (("dcp", None), ("flat", FLAT)):
        state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp.save(state, checkpoint_id=folder / name)


def unpack(folder: Path) -> Path:
    with tarfile.open(Path(__file__).parent / "kept.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder
