"""Checks of steps on layouts: each beside the same step on one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...optim import DistMuon
from .check import Finding
from .comparison import Comparison, Net, muon_on, named
from .context import Context
from .numerics import seeded

_STEPS = 3


def _compared(context: Context, layout: str, model: nn.Module, whole: Net, **options: Any) -> Finding:
    params = named(model)
    comparison = Comparison(context, params, named(whole), muon_on(params, **options), wire=options.get("comm_dtype"))
    comparison.run(range(_STEPS))
    return comparison.finding(layout)


def _nets(context: Context, sizes: tuple[int, int, int]) -> tuple[Net, Net]:
    return Net(*sizes).to(context.device), Net(*sizes).to(context.device)


def _fsdp(context: Context, layout: str, sizes: tuple[int, int, int], *mesh: int, **options: Any) -> Finding:
    from torch.distributed.fsdp import fully_shard

    model, whole = _nets(context, sizes)
    with context.doing("sharding a model with FSDP2"):
        fully_shard(model, mesh=context.mesh(*mesh))
    return _compared(context, layout, model, whole, **options)


def check_fsdp2(context: Context) -> Finding:
    """FSDP2 over all ranks, with rows that do not divide."""
    world = context.world
    return _fsdp(context, f"FSDP2 on {world}, uneven shards", (24, 3 * world + 1, 2 * world + 3), world)


def check_empty_shards(context: Context) -> Finding:
    """FSDP2 with fewer rows than ranks."""
    world, rows = context.world, max(1, context.world // 2)
    return _fsdp(context, f"FSDP2 with {rows} {'row' if rows == 1 else 'rows'} on {world}", (16, rows, 24), world)


def check_hsdp(context: Context) -> Finding:
    """FSDP2 over a mesh of replicas and shards."""
    replicas, shards = context.two_axes()
    sizes = (24, 3 * shards + 1, 2 * shards + 3)
    return _fsdp(context, f"HSDP on {replicas} × {shards} (replicas × shards)", sizes, replicas, shards)


def check_bf16_wire(context: Context) -> Finding:
    """FSDP2 with bfloat16 on the wire."""
    world = context.world
    sizes = (24, 3 * world + 1, 2 * world + 3)
    return _fsdp(context, f"FSDP2 on {world}, bfloat16 on the wire", sizes, world, comm_dtype=torch.bfloat16)


def check_tp_fsdp(context: Context) -> Finding:
    """Tensor parallel layers under FSDP2."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    tp, dp = context.two_axes()
    model, whole = _nets(context, (4 * tp * dp, 2 * tp * dp, 3 * dp))  # sizes that divide, as FSDP2 over TP asks for
    mesh = context.mesh(dp, tp)
    with context.doing("sharding a model with tensor parallelism and FSDP2"):
        parallelize_module(model, mesh["b"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        fully_shard(model, mesh=mesh["a"])
    return _compared(context, f"TP × FSDP2 on {tp} × {dp}", model, whole)


def check_ep_fsdp(context: Context) -> Finding:
    """Experts over one axis of a mesh, and their rows over the other."""
    from torch.distributed.tensor import Shard, distribute_tensor

    ep, dp = context.two_axes()
    mesh, experts = context.mesh(dp, ep), 2 * ep + 1
    values = {
        "experts.w1": seeded((experts, 3 * dp + 1, 12), 1).to(context.device),
        "experts.w2": seeded((experts, 12, 2 * dp + 1), 2).to(context.device),
    }
    params = {
        name: nn.Parameter(distribute_tensor(value.clone(), mesh, [Shard(1), Shard(0)], src_data_rank=None))
        for name, value in values.items()
    }
    whole = {name: nn.Parameter(value) for name, value in values.items()}
    comparison = Comparison(context, params, whole)
    comparison.run(range(_STEPS))
    return comparison.finding(f"EP × FSDP on {ep} × {dp}, {experts} experts")


def check_ddp(context: Context) -> Finding:
    """DistributedDataParallel, whose replicas divide the orthogonalisations."""
    model, whole = _nets(context, (24, 18, 11))
    with context.doing("wrapping a model with DistributedDataParallel"):
        wrapped = nn.parallel.DistributedDataParallel(model)
    with context.doing("a forward and a backward pass"):
        wrapped(seeded((4, 24), context.rank).to(context.device)).square().mean().backward()
    group = dist.group.WORLD
    return _compared(context, f"DDP on {context.world}, work divided", wrapped, whole, replica_group=group)


def check_dist_muon(context: Context) -> Finding:
    """DistMuon: every rank brings gradients of its own, which it averages."""
    shapes = {"a": (13, 9), "b": (6, 14), "c": (5, 5), "d": (1, 7)}
    own, alone = (
        {name: nn.Parameter(seeded(shape, k).to(context.device)) for k, (name, shape) in enumerate(shapes.items())}
        for _ in range(2)
    )
    optimizer = DistMuon(list(own.items()), deterministic=True)
    reference = muon_on(alone, lr=0.02, adjust_lr_fn="original", weight_decay=0.0)
    comparison = Comparison(context, own, alone, optimizer, reference)

    def gradient(step: int, name: str, rank: int) -> Tensor:
        return seeded(shapes[name], 10_000 * step + 100 * rank + ord(name)).to(context.device)

    def give_gradients(step: int) -> None:
        for name, param in alone.items():
            total = gradient(step, name, 0)
            for other in range(1, context.world):
                total += gradient(step, name, other)
            own[name].grad, param.grad = gradient(step, name, context.rank), total / context.world

    comparison.run(range(_STEPS), give_gradients)
    return comparison.finding(f"DistMuon on {context.world}")
