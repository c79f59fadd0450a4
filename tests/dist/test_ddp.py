"""DDP replicas: every rank computes the same update, the one a single device computes from the averaged gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshmuon import Muon, get_default_muon_param_groups
from tests.support.processes import results_of, run_ranks

WORLD, STEPS = 2, 3


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12))


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randint(0, 20, (4,), generator=torch.Generator().manual_seed(100 * step + rank))


def train_replica(rank: int, folder: Path) -> dict[str, Any]:
    """The weights of this rank after all steps, and the averaged gradients of each."""
    model = DistributedDataParallel(build_model())
    optimizer = Muon(get_default_muon_param_groups(model), lr=0.01)
    grads = []
    for step in range(STEPS):
        model(batch_of(rank, step)).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    return {"params": [p.detach() for p in model.parameters()], "grads": grads}


def test_replicas_equal_one_device(tmp_path: Path) -> None:
    ranks = results_of(run_ranks(WORLD, train_replica, tmp_path))
    single = build_model()
    optimizer = Muon(get_default_muon_param_groups(single), lr=0.01)
    for grads in ranks[0]["grads"]:
        for param, grad in zip(single.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()
    for rank in ranks:
        for mine, param in zip(rank["params"], single.parameters(), strict=True):
            torch.testing.assert_close(mine, param.detach(), rtol=0, atol=0)
