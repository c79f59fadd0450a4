"""DDP replicas: every rank computes the same update, the one a single device computes from the averaged gradients."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshmuon import Muon, get_default_muon_param_groups

WORLD, STEPS = 2, 3


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 12), nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12))


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randint(0, 20, (4,), generator=torch.Generator().manual_seed(100 * step + rank))


def run_rank(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    model = DistributedDataParallel(build_model())
    optimizer = Muon(get_default_muon_param_groups(model), lr=0.01)
    grads = []
    for step in range(STEPS):
        model(batch_of(rank, step)).square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    result = {"params": [p.detach() for p in model.parameters()], "grads": grads}
    torch.save(result, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def test_replicas_equal_one_device(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, args=(port, str(tmp_path)), nprocs=WORLD)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(WORLD)]
    single = build_model()
    optimizer = Muon(get_default_muon_param_groups(single), lr=0.01)
    for grads in ranks[0]["grads"]:
        for param, grad in zip(single.parameters(), grads, strict=True):
            param.grad = grad
        optimizer.step()
    for rank in ranks:
        for mine, param in zip(rank["params"], single.parameters(), strict=True):
            torch.testing.assert_close(mine, param.detach(), rtol=0, atol=0)
