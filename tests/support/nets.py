"""A net of two layers under torch's own wrappers, beside the same net on one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshmuon import Muon

from .counting import Wire, counted
from .tensors import like, local, same, seeded

STEPS = 5


class Net(nn.Module):
    """Two layers without anything in between: ``first`` for column-wise, ``second`` for row-wise parallelism."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


def build_net(sizes: tuple[int, int, int]) -> Net:
    net = Net(*sizes)
    generator = torch.Generator().manual_seed(3)  # its own, since ranks may be threads
    for param in net.parameters():
        nn.init.normal_(param, generator=generator)
    return net


def optimizer_of(model: nn.Module, **options: Any) -> Muon:
    groups = []
    for use_muon in (True, False):
        named = [(name, p) for name, p in model.named_parameters() if (p.dim() == 2) is use_muon]
        groups.append({"params": named, "use_muon": use_muon})
    return Muon(groups, lr=0.01, **options)


def train(model: nn.Module, watch: Callable[[Muon], object] | None = None, **options: Any) -> Muon:
    """Steps with gradients that are cut from one seeded gradient, as the parameters are."""
    optimizer = optimizer_of(model, **options)
    for step in range(STEPS):
        for k, param in enumerate(model.parameters()):
            param.grad = like(param, seeded(param.shape, 100 * step + k))
        optimizer.step()
        if watch is not None:
            watch(optimizer)
    return optimizer


def check_module(
    wrap: Callable[[Net], object], sizes: tuple[int, int, int], wire: Wire | None = None, **options: Any
) -> tuple[Net, Muon]:
    """A wrapped model beside the same model on one device. Ranks that are threads share a ``wire``."""
    whole, model = build_net(sizes), build_net(sizes)
    wrap(model)
    with counted() if wire is None else nullcontext(wire) as wire:
        optimizer = train(model, wire.watch, **options)
    if not options.get("use_distributed_muon"):
        wire.check(dist.get_rank())
    reference = train(whole)
    for (name, sharded), param in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(sharded, DTensor), f"{name} was not wrapped"
        same(local(sharded), local(like(sharded, param.detach())), name)
        key = "momentum_buffer" if param.dim() == 2 else "exp_avg"
        same(
            local(optimizer.state[sharded][key]),
            local(like(sharded, reference.state[param][key])),
            f"momentum of {name}",
        )
    return model, optimizer


TP_PLAN = {"first": ColwiseParallel, "second": RowwiseParallel}


def split_by_layer(net: Net, mesh: DeviceMesh) -> None:
    parallelize_module(net, mesh, {name: kind() for name, kind in TP_PLAN.items()})


def tp_and_fsdp(net: Net, mesh: DeviceMesh) -> None:
    split_by_layer(net, mesh["tp"])
    fully_shard(net, mesh=mesh["dp"])
