"""A fixed list of cases for real gloo processes, each against one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from meshmuon.errors import ConfigError
from tests.dist.reference_layouts import random_layouts_on_the_reference_path
from tests.dist.test_nonfinite import GUARDED, check_guard
from tests.support.cases import Case, Param, check, check_missing, held_by, place, sharded, single
from tests.support.counting import counted
from tests.support.nets import Net, build_net, check_module, optimizer_of, split_by_layer, tp_and_fsdp
from tests.support.processes import Job
from tests.support.tensors import local, same

MOST, STEPS = 4, 5
R, S0, S1 = Replicate(), Shard(0), Shard(1)


# Models under torch's own wrappers.


def on_axes(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def fsdp(sizes: tuple[int, int, int], **options: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, optimizer = check_module(lambda net: fully_shard(net, mesh=mesh), sizes, **options)
    assert all(p.placements == (S0,) for p in model.parameters())
    assert len(optimizer.plan().tasks) == 2


def hsdp(sizes: tuple[int, int, int], **options: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = check_module(lambda net: fully_shard(net, mesh=mesh), sizes, **options)
    assert all(p.placements == (R, S0) for p in model.parameters())
    assert len(optimizer.plan().tasks) == {"share": 2, "repeat": 4}[options["replicas"]]


def tp(sizes: tuple[int, int, int], **options: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, _ = check_module(lambda net: split_by_layer(net, mesh), sizes, **options)
    assert model.first.weight.placements == (S0,)
    assert model.second.weight.placements == (S1,)


def fsdp_over_tp(sizes: tuple[int, int, int], **options: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, _ = check_module(lambda net: tp_and_fsdp(net, mesh), sizes, **options)
    assert model.first.weight.device_mesh.ndim == 2
    assert model.second.weight.placements == (S0, S1)


def trained(wrap: Callable[[Net], nn.Module | None], sizes: tuple[int, int, int] = (5, 7, 3)) -> None:
    """Through forward and backward: the averaged gradients of torch's wrapper, gathered, give one device the same
    bits.
    """
    whole, model = build_net(sizes), build_net(sizes)
    wrapped = wrap(model) or model
    optimizer, reference = optimizer_of(model), optimizer_of(whole)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        wrapped(torch.randn(4, sizes[0], generator=generator)).square().mean().backward()
        for mine, param in zip(model.parameters(), whole.parameters(), strict=True):
            param.grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad.clone()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    for (name, mine), param in zip(model.named_parameters(), whole.parameters(), strict=True):
        found = mine.detach()
        same(found.full_tensor() if isinstance(found, DTensor) else found, param.detach(), name)


# Tensors placed by hand.


def placed(shape: tuple[int, ...], params: tuple[Param, ...], *, flat: bool = False, **options: Any) -> None:
    case = Case(params, options)
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])]
    if flat:
        meshes.append(DeviceMesh("cpu", torch.arange(math.prod(shape))))
    with counted() as wire:
        check(case, meshes, single(case), watch=wire.watch)
    if not options.get("use_distributed_muon"):
        wire.check(dist.get_rank())


DDP = Case((*(Param(shape, None) for shape in ((7, 5), (5, 7), (6, 6), (4, 9))), Param((5,), None, muon=False)))


def ddp_divides_the_work() -> None:
    expected = single(DDP)
    with counted() as wire:
        optimizer = check(DDP, [], expected, watch=wire.watch, replica_group=dist.group.WORLD)
    wire.check(dist.get_rank())
    tasks = optimizer.plan().tasks
    assert sorted(task.param for task in tasks) == [0, 1, 2, 3], "a matrix has not exactly one owner"
    owners = [task.owner for task in tasks]
    assert set(owners) == set(range(dist.get_world_size()))
    assert wire.calls


def pipeline_stages() -> None:
    """Two stages of two ranks: other parameters, other meshes; a stage needs nothing from the other, not even its
    steps.
    """
    stage = dist.get_rank() // 2
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]  # making a mesh is for all ranks
    shapes = [((7, 5), (6, 4)), ((5, 9), (3, 3), (8, 2))][stage]
    case = Case(tuple(Param(shape, 0, (S0,)) for shape in shapes), steps=STEPS - stage)
    with counted() as wire:
        optimizer = check(case, [meshes[stage]], single(case), watch=wire.watch)
    wire.check(dist.get_rank())
    assert optimizer.plan().ranks == ((0, 1), (2, 3))[stage]


def meshes_over_some_ranks() -> None:
    """All ranks hold all parameters, of some an empty part: two meshes that share a rank, and a third apart from
    them.
    """
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2]), DeviceMesh("cpu", [3])]
    case = Case((Param((7, 5), 0, (S0,)), Param((6, 4), 1, (S0,)), Param((5, 5), 2, (S0,)), Param((4, 7), 1, (R,))))
    expected = single(case)
    found, states, _ = sharded(case, meshes)
    for k, one in enumerate(case.params):
        if meshes[one.mesh].get_coordinate() is not None:
            same(found[k], local(place(case, meshes, k, expected[0][k])), f"parameter {k}")
            for key, value in expected[1][k].items():
                same(states[k][key], local(place(case, meshes, k, value)), f"{key} {k}")


def dist_muon() -> None:
    """Every rank with gradients of its own; odd sizes, fewer matrices than ranks in some waves, and one that a rank
    lacks.
    """
    shapes = ((7, 5), (6, 4), (5, 9), (1, 3), (8, 8))
    case = Case(tuple(Param(shape, None) for shape in shapes), missing=((1, 0, 1),), averages=True)
    held = [held_by(case, [])] * dist.get_world_size()
    check(case, [], single(case, held), held)


def replica_groups_inside_a_mesh() -> None:
    """Plain tensors replicated along one axis only, beside DTensors on all axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    case = Case((Param((7, 5), 0, (S0, S1)), Param((6, 4), None), Param((5, 5), None)))
    with counted() as wire:
        check(case, [mesh], single(case), watch=wire.watch, replica_group=mesh["dp"])
    wire.check(dist.get_rank())
    with pytest.raises(ConfigError, match=r"Pass the mesh instead of the process group"):
        sharded(case, [mesh], replica_group=mesh["dp"].get_group())


def missing_gradient_on_one_rank() -> None:
    """The shard of rank 1 has no gradient in some steps: its rows count as zeros."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    case = Case((Param((7, 5), 0, (S0,)), Param((6, 4), 0, (S0,)), Param((5,), 0, (S0,), muon=False)))
    check_missing(case, mesh, without_gradient={(1, 0): {1}, (3, 0): {0, 2}, (2, 2): {1}})


UNEVEN, EVEN = (5, 7, 3), (4, 8, 12)
FEW = (6, 2, 9)  # ``first`` has fewer rows than ranks
MIXED = tuple(Param((9, 6), 0, (S0,), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64))
IDLE = (
    Param((6, 5), 0, (S0,), unused=(0, 3)),
    Param((5, 5), 0, (S0,), frozen=True),
    Param((4, 5), 0, (S1,), unused=(1, 2, 3, 4)),
    Param((5,), 0, (S0,), muon=False, unused=(2,)),
)
TWO_MESHES = (Param((7, 5), 0, (S0, S1)), Param((11, 4), 1, (S0,)), Param((4, 6), 1, (R,)), Param((6, 6), 0, (R, S0)))
WHOLE = (Param((6, 4), 0, (R,)), Param((4, 6), 0, (R,)), Param((6,), 0, (R,), muon=False))

REAL_GUARDS = (
    "Shard(0) on 2",
    "Shard(0) on 4, with empty shards",
    "replicated",
    "HSDP, every replica computes",
    "DistMuon",
)
CASES: dict[str, tuple[int, Callable[[], object]]] = {  # name: number of ranks, what each of them runs
    **{
        f"FSDP2, {world} ranks, {text}": (world, partial(fsdp, sizes))
        for world in (2, 3, 4)
        for text, sizes in (("uneven", UNEVEN), ("few rows", FEW))
    },
    "FSDP2, 4 ranks, even": (4, partial(fsdp, EVEN)),
    "DistMuon, 2 ranks": (2, dist_muon),
    "DistMuon, 4 ranks": (4, dist_muon),
    "random layouts, reference": (4, random_layouts_on_the_reference_path),
    "FSDP2, 3 ranks, reference": (3, partial(fsdp, UNEVEN, use_distributed_muon=True)),
    "FSDP2, 3 ranks, forward and backward": (3, partial(trained, lambda net: fully_shard(net, mesh=on_axes(3)))),
    "DDP, forward and backward": (2, partial(trained, DistributedDataParallel)),
    "FSDP2 over TP, forward and backward": (4, partial(trained, lambda net: tp_and_fsdp(net, on_axes(2, 2)), EVEN)),
    "HSDP, shared": (4, partial(hsdp, UNEVEN, replicas="share")),
    "HSDP, repeated": (4, partial(hsdp, UNEVEN, replicas="repeat")),
    "HSDP, reference": (4, partial(hsdp, UNEVEN, replicas="share", use_distributed_muon=True)),
    "TP, 2 ranks": (2, partial(tp, EVEN)),
    "TP, 3 ranks, uneven": (3, partial(tp, UNEVEN)),
    "TP, reference": (2, partial(tp, UNEVEN, use_distributed_muon=True)),
    "FSDP2 over TP": (4, partial(fsdp_over_tp, EVEN)),
    "FSDP2 over TP, one matrix at a time": (4, partial(fsdp_over_tp, EVEN, chunk_size=1, warmup_step=0)),
    "FSDP2 over TP, reference": (4, partial(fsdp_over_tp, EVEN, use_distributed_muon=True)),
    "FSDP2 over TP, uneven": (4, partial(fsdp_over_tp, (6, 7, 5))),
    "FSDP2 over TP, few rows": (4, partial(fsdp_over_tp, (5, 3, 3))),
    "FSDP2 over TP, a rank without rows or columns": (4, partial(fsdp_over_tp, (6, 1, 4))),
    "replicated, shared": (3, partial(placed, (3,), WHOLE, replicas="share")),
    "replicated, repeated": (3, partial(placed, (3,), WHOLE, replicas="repeat")),
    "replicated, auto": (4, partial(placed, (4,), WHOLE)),
    "DDP, divided": (3, ddp_divides_the_work),
    **{f"a guarded update, {case}": (GUARDED[case][0].world, partial(check_guard, case)) for case in REAL_GUARDS},
    "pipeline stages": (4, pipeline_stages),
    "replica groups inside a mesh": (4, replica_groups_inside_a_mesh),
    "two meshes": (4, partial(placed, (2, 2), TWO_MESHES, flat=True)),
    "mixed dtypes": (3, partial(placed, (3,), MIXED)),
    "mixed dtypes, reference": (3, partial(placed, (3,), MIXED, use_distributed_muon=True)),
    "frozen and unused": (2, partial(placed, (2,), IDLE)),
    "experts, EP": (4, partial(placed, (4,), (Param((7, 5, 4), 0, (S0,)), Param((6, 5), 0, (S0,))))),
    "experts, fewer than ranks": (4, partial(placed, (4,), (Param((3, 5, 4), 0, (S0,)), Param((6, 5), 0, (S0,))))),
    "experts, EP × FSDP": (4, partial(placed, (2, 2), (Param((7, 5, 4), 0, (_StridedShard(0, split_factor=2), S0)),))),
    "experts, EP × FSDP on rows": (4, partial(placed, (2, 2), (Param((3, 5, 4), 0, (S1, S0)),))),
    "experts, EP × TP": (4, partial(placed, (2, 2), (Param((5, 6, 5), 0, (S0, Shard(2))),))),
    "experts, HSDP": (4, partial(placed, (2, 2), (Param((5, 6, 5), 0, (R, S0)), Param((4, 6, 5), 0, (R, S1))))),
    "little memory": (4, partial(placed, (4,), tuple(Param((6, 5), 0, (S0,)) for _ in range(6)), memory_budget=1)),
    "a gradient is missing on one rank": (3, missing_gradient_on_one_rank),
}


# Cases that have hung: each in processes of its own, which a test can end.
ALONE: dict[str, tuple[int, Callable[[], None]]] = {"meshes over some ranks": (4, meshes_over_some_ranks)}


def jobs() -> dict[str, Job]:
    """The cases as jobs, none of which needs the folder that they share."""
    return {name: Job(world, lambda _, run=run: run()) for name, (world, run) in CASES.items()}


def run_alone(rank: int, folder: Path, name: str) -> None:
    """One of the cases in ``ALONE``, on this rank."""
    ALONE[name][1]()
