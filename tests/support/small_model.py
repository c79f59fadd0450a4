"""A small model, whole or on a mesh: five matrices for Muon and a vector for AdamW, with seeded gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshmuon import Muon

from .tensors import like, local, same, seeded

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SHAPES = ((8, 6), (6, 9), (5, 7), (11, 4), (4, 4), (10,))  # the last one is AdamW's


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def on_mesh(value: Tensor, mesh: DeviceMesh | None, placement: Any = S0) -> Tensor:
    return value if mesh is None else distribute_tensor(value, mesh, [placement], src_data_rank=None)


def initial(mesh: DeviceMesh | None, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(on_mesh(seeded(shape, k), mesh)) for k, shape in enumerate(shapes)]


def muon_of(params: Sequence[nn.Parameter], **options: Any) -> Muon:
    """Matrices to Muon, the rest to AdamW; named a, b, c, …"""
    named = [("abcdefghijk"[k], param) for k, param in enumerate(params)]
    groups = [
        {"params": chosen, "use_muon": use_muon}
        for use_muon in (True, False)
        if (chosen := [pair for pair in named if (pair[1].dim() == 2) is use_muon])
    ]
    return Muon(groups, lr=0.01, **options)


def give_gradients(params: Sequence[nn.Parameter], step: int) -> None:
    for k, param in enumerate(params):
        param.grad = like(param, seeded(param.shape, 1000 + 100 * step + k))


def run_steps(params: Sequence[nn.Parameter], optimizer: Muon, steps: Iterable[int]) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def after(steps: int, shapes: Sequence[tuple[int, ...]] = SHAPES, **options: Any) -> list[Tensor]:
    """The parameters of one device after so many steps."""
    params = initial(None, shapes)
    run_steps(params, muon_of(params, **options), range(steps))
    return [param.detach() for param in params]


def assert_equal(params: Sequence[Tensor], whole: Sequence[Tensor]) -> None:
    """Bit for bit what one device has, in this rank's part."""
    for k, (param, value) in enumerate(zip(params, whole, strict=True)):
        shard, expected = local(param), local(like(param, value))
        assert shard.shape == expected.shape, f"parameter {k}: {tuple(shard.shape)} and {tuple(expected.shape)}"
        same(shard, expected, f"parameter {k}", equal_nan=True)
