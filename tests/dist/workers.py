"""Real gloo processes: a fixed list of cases, each in a world of its own, each against one device."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import DistMuon, Muon
from meshmuon.errors import ConfigError, GradientError, MeshmuonError, PlanError

from .cases import Case, Param, check, gradient, initial, local, place, run, same, sharded, single
from .counting import Wire, counted
from .reference_layouts import random_layouts_on_the_reference_path

MOST, STEPS = 4, 5
R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Net(nn.Module):
    """Two layers without anything in between: ``first`` for column-wise, ``second`` for row-wise parallelism."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


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


def train(model: nn.Module, watch: Callable[[Muon], None] | None = None, **options: Any) -> Muon:
    """Steps with gradients that are cut from one seeded gradient, as the parameters are."""
    optimizer = optimizer_of(model, **options)
    for step in range(STEPS):
        for k, param in enumerate(model.parameters()):
            param.grad = like(param, seeded(param, step, k))
        optimizer.step()
        if watch is not None:
            watch(optimizer)
    return optimizer


def seeded(param: Tensor, step: int, k: int) -> Tensor:
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + k))


def like(param: Tensor, value: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return value.clone()
    return distribute_tensor(value.clone(), param.device_mesh, param.placements, src_data_rank=None)  # torch 2.9 gives views


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
    for (name, mine), param in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(mine, DTensor), f"{name} was not wrapped"
        same(local(mine), local(like(mine, param.detach())), name)
        key = "momentum_buffer" if param.dim() == 2 else "exp_avg"
        same(local(optimizer.state[mine][key]), local(like(mine, reference.state[param][key])), f"momentum of {name}")
    return model, optimizer


# Models under torch's own wrappers.


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


TP_PLAN = {"first": ColwiseParallel, "second": RowwiseParallel}


def split_by_layer(net: Net, mesh: DeviceMesh) -> None:
    parallelize_module(net, mesh, {name: kind() for name, kind in TP_PLAN.items()})


def tp(sizes: tuple[int, int, int], **options: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, _ = check_module(lambda net: split_by_layer(net, mesh), sizes, **options)
    assert model.first.weight.placements == (S0,)
    assert model.second.weight.placements == (S1,)


def tp_and_fsdp(net: Net, mesh: DeviceMesh) -> None:
    split_by_layer(net, mesh["tp"])
    fully_shard(net, mesh=mesh["dp"])


def fsdp_over_tp(sizes: tuple[int, int, int], **options: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, _ = check_module(lambda net: tp_and_fsdp(net, mesh), sizes, **options)
    assert model.first.weight.device_mesh.ndim == 2
    assert model.second.weight.placements == (S0, S1)


def shards_that_contradict_their_placements() -> None:
    """A wrapper that stores other shards than the placements say; all ranks refuse, also those whose shard is right."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = (3, 1, 2, 1)[dist.get_rank()]  # torch's Shard(0) of 7 rows over 4 ranks is 2, 2, 2, 1
    param = nn.Parameter(DTensor.from_local(torch.ones(rows, 5), mesh, [S0], run_check=False, shape=(7, 5), stride=(5, 1)))
    other = nn.Parameter(distribute_tensor(torch.ones(6, 5), mesh, [S0], src_data_rank=None))
    optimizer = Muon([{"params": [other, param], "names": ["right", "wrong"], "use_muon": True}])
    param.grad, other.grad = torch.ones_like(param), torch.ones_like(other)
    text = error_of(optimizer.step, PlanError)
    assert text.startswith("rank 0: wrong is [S(0)]")
    assert "should hold (2, 5), but it holds (3, 5)" in text
    assert "choose sizes that divide" in text
    assert_same_everywhere(text)
    for one in (param, other):
        same(local(one), torch.ones_like(local(one)), "written by a refused step")


def trained_fsdp_equals_one_device() -> None:
    """Through forward and backward: FSDP2's own averaged gradients, gathered, give one device the same bits."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, model = build_net((5, 7, 3)), build_net((5, 7, 3))
    fully_shard(model, mesh=mesh)
    optimizer, reference = optimizer_of(model), optimizer_of(whole)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        for mine, param in zip(model.parameters(), whole.parameters(), strict=True):
            param.grad = mine.grad.full_tensor()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    for (name, mine), param in zip(model.named_parameters(), whole.parameters(), strict=True):
        same(mine.detach().full_tensor(), param.detach(), name)


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


def ddp_without_a_group_sends_nothing() -> None:
    with counted() as wire:
        check(DDP, [], single(DDP))
    assert not wire.calls


def pipeline_stages() -> None:
    """Two stages of two ranks: other parameters, other meshes; a stage needs nothing from the other, not even its steps."""
    stage = dist.get_rank() // 2
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]  # making a mesh is for all ranks
    shapes = [((7, 5), (6, 4)), ((5, 9), (3, 3), (8, 2))][stage]
    case = Case(tuple(Param(shape, 0, (S0,)) for shape in shapes), steps=STEPS - stage)
    with counted() as wire:
        optimizer = check(case, [meshes[stage]], single(case), watch=wire.watch)
    wire.check(dist.get_rank())
    assert optimizer.plan().ranks == ((0, 1), (2, 3))[stage]


def meshes_over_some_ranks() -> None:
    """All ranks hold all parameters, of some an empty part: two meshes that share a rank, and a third apart from them."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2]), DeviceMesh("cpu", [3])]
    case = Case((Param((7, 5), 0, (S0,)), Param((6, 4), 1, (S0,)), Param((5, 5), 2, (S0,)), Param((4, 7), 1, (R,))))
    expected = single(case)
    found, momentum, _ = sharded(case, meshes)
    for k, one in enumerate(case.params):
        if meshes[one.mesh].get_coordinate() is not None:
            same(found[k], local(place(case, meshes, k, expected[0][k])), f"parameter {k}")
            same(momentum[k], local(place(case, meshes, k, expected[1][k])), f"momentum {k}")


def dist_muon() -> None:
    """Every rank with gradients of its own, over real processes; odd sizes, fewer matrices than ranks in some waves."""
    world, rank, shapes = dist.get_world_size(), dist.get_rank(), [(7, 5), (6, 4), (5, 9), (1, 3), (8, 8)]

    def grad(step: int, k: int, owner: int) -> Tensor:
        return torch.randn(shapes[k], generator=torch.Generator().manual_seed(1000 * step + 10 * k + owner))

    mine, alone = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    ours = DistMuon(mine)
    single = Muon([{"params": alone, "use_muon": True}], lr=0.02, adjust_lr_fn="original", weight_decay=0.0)
    for step in range(STEPS):
        for k in range(len(shapes)):
            mine[k].grad = grad(step, k, rank)
            total = grad(step, k, 0)
            for other in range(1, world):
                total += grad(step, k, other)
            alone[k].grad = total / world
        ours.step()
        single.step()
    ours.consolidate()
    for k in range(len(shapes)):
        same(mine[k].detach(), alone[k].detach(), f"parameter {k}")
        same(ours.state[mine[k]]["momentum_buffer"], single.state[alone[k]]["momentum_buffer"], f"momentum {k}")


def replica_groups_inside_a_mesh() -> None:
    """Plain tensors replicated along one axis only, beside DTensors on all axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    case = Case((Param((7, 5), 0, (S0, S1)), Param((6, 4), None), Param((5, 5), None)))
    with counted() as wire:
        check(case, [mesh], single(case), watch=wire.watch, replica_group=mesh["dp"])
    wire.check(dist.get_rank())
    with pytest.raises(ConfigError, match=r"Instead of the group pass its mesh"):
        sharded(case, [mesh], replica_group=mesh["dp"].get_group())


def missing_gradient_on_one_rank() -> None:
    """The shard of rank 1 has no gradient in some steps: its rows count as zeros."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    case = Case((Param((7, 5), 0, (S0,)), Param((6, 4), 0, (S0,)), Param((5,), 0, (S0,), muon=False)))
    check_missing(case, mesh, without_state={(1, 0): {1}, (3, 0): {0, 2}, (2, 2): {1}})


def check_missing(case: Case, mesh: DeviceMesh, without_state: dict[tuple[int, int], set[int]]) -> None:
    """Runs a case in which, at (step, parameter), some ranks lack the gradient, against zeros on one device."""
    rank = dist.get_rank()

    def shard(step: int, k: int) -> Tensor | None:
        value = gradient(case, step, k)
        absent = value is None or rank in without_state.get((step, k), set())
        return None if absent else place(case, [mesh], k, value)

    def zeroed(step: int, k: int) -> Tensor | None:
        value = gradient(case, step, k)
        for other in sorted(without_state.get((step, k), set())):
            value = without_shard(value, other, dist.get_world_size(), case.params[k].placements[0].dim)
        return value

    mine = run(case, [nn.Parameter(place(case, [mesh], k, value)) for k, value in enumerate(initial(case))], shard)
    wanted = run(case, [nn.Parameter(value) for value in initial(case)], zeroed)
    for k in range(len(case.params)):
        part, momentum = (local(place(case, [mesh], k, side[k])) for side in wanted[:2])
        same(mine[0][k], part, f"parameter {k}")
        same(mine[1][k], momentum, f"momentum {k}")


def without_shard(value: Tensor, rank: int, world: int, dim: int) -> Tensor:
    """Zeros where torch's Shard(dim) puts the part of ``rank``."""
    chunks = list(value.chunk(world, dim))
    if rank < len(chunks):
        chunks[rank] = torch.zeros_like(chunks[rank])
    return torch.cat(chunks, dim)


def replicas_that_disagree() -> None:
    """A gradient on one replica only: the same words on every rank, nothing written."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    case = Case((Param((6, 4), 0, (R,)), Param((8, 4), 0, (S0,))))
    params = [nn.Parameter(place(case, [mesh], k, value)) for k, value in enumerate(initial(case))]
    optimizer = Muon([{"params": params, "names": ["one", "two"], "use_muon": True}], replicas="share")
    before = [local(p) for p in params]
    params[1].grad = torch.ones_like(params[1])
    if dist.get_rank() == 1:
        params[0].grad = torch.ones_like(params[0])
    text = error_of(optimizer.step, GradientError)
    assert "one has a gradient on rank 1 and none on rank 0" in text
    assert_same_everywhere(text)
    for param, old in zip(params, before, strict=True):
        same(local(param), old, "written by a refused step")


def error_of(call: Callable[[], object], kind: type[MeshmuonError]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def assert_same_everywhere(text: str) -> None:
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1, texts


@dataclass(frozen=True)
class Job:
    world: int
    run: Callable[[], None]


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

JOBS: dict[str, Job] = {
    **{
        f"FSDP2, {world} ranks, {text}": Job(world, partial(fsdp, sizes))
        for world in (2, 3, 4)
        for text, sizes in (("uneven", UNEVEN), ("few rows", FEW))
    },
    "FSDP2, 4 ranks, even": Job(4, partial(fsdp, EVEN)),
    "DistMuon, 2 ranks": Job(2, dist_muon),
    "DistMuon, 4 ranks": Job(4, dist_muon),
    "random layouts, reference": Job(4, random_layouts_on_the_reference_path),
    "FSDP2, 3 ranks, reference": Job(3, partial(fsdp, UNEVEN, use_distributed_muon=True)),
    "FSDP2, 3 ranks, forward and backward": Job(3, trained_fsdp_equals_one_device),
    "HSDP, shared": Job(4, partial(hsdp, UNEVEN, replicas="share")),
    "HSDP, repeated": Job(4, partial(hsdp, UNEVEN, replicas="repeat")),
    "HSDP, reference": Job(4, partial(hsdp, UNEVEN, replicas="share", use_distributed_muon=True)),
    "TP, 2 ranks": Job(2, partial(tp, EVEN)),
    "TP, 3 ranks, uneven": Job(3, partial(tp, UNEVEN)),
    "TP, reference": Job(2, partial(tp, UNEVEN, use_distributed_muon=True)),
    "FSDP2 over TP": Job(4, partial(fsdp_over_tp, EVEN)),
    "FSDP2 over TP, one matrix at a time": Job(4, partial(fsdp_over_tp, EVEN, chunk_size=1, warmup_step=0)),
    "FSDP2 over TP, reference": Job(4, partial(fsdp_over_tp, EVEN, use_distributed_muon=True)),
    "FSDP2 over TP, uneven": Job(4, partial(fsdp_over_tp, (6, 7, 5))),
    "FSDP2 over TP, few rows": Job(4, partial(fsdp_over_tp, (5, 3, 3))),
    "FSDP2 over TP, a rank without rows or columns": Job(4, partial(fsdp_over_tp, (6, 1, 4))),
    "shards that contradict their placements": Job(4, shards_that_contradict_their_placements),
    "replicated, shared": Job(3, partial(placed, (3,), WHOLE, replicas="share")),
    "replicated, repeated": Job(3, partial(placed, (3,), WHOLE, replicas="repeat")),
    "replicated, auto": Job(4, partial(placed, (4,), WHOLE)),
    "DDP, divided": Job(3, ddp_divides_the_work),
    "DDP, not divided": Job(2, ddp_without_a_group_sends_nothing),
    "pipeline stages": Job(4, pipeline_stages),
    "replica groups inside a mesh": Job(4, replica_groups_inside_a_mesh),
    "two meshes": Job(4, partial(placed, (2, 2), TWO_MESHES, flat=True)),
    "mixed dtypes": Job(3, partial(placed, (3,), MIXED)),
    "mixed dtypes, reference": Job(3, partial(placed, (3,), MIXED, use_distributed_muon=True)),
    "frozen and unused": Job(2, partial(placed, (2,), IDLE)),
    "experts, EP": Job(4, partial(placed, (4,), (Param((7, 5, 4), 0, (S0,)), Param((6, 5), 0, (S0,))))),
    "experts, fewer than ranks": Job(4, partial(placed, (4,), (Param((3, 5, 4), 0, (S0,)), Param((6, 5), 0, (S0,))))),
    "experts, EP × FSDP": Job(4, partial(placed, (2, 2), (Param((7, 5, 4), 0, (_StridedShard(0, split_factor=2), S0)),))),
    "experts, EP × FSDP on rows": Job(4, partial(placed, (2, 2), (Param((3, 5, 4), 0, (S1, S0)),))),
    "experts, EP × TP": Job(4, partial(placed, (2, 2), (Param((5, 6, 5), 0, (S0, Shard(2))),))),
    "experts, HSDP": Job(4, partial(placed, (2, 2), (Param((5, 6, 5), 0, (R, S0)), Param((4, 6, 5), 0, (R, S1))))),
    "little memory": Job(4, partial(placed, (4,), tuple(Param((6, 5), 0, (S0,)) for _ in range(6)), memory_budget=1)),
    "a gradient is missing on one rank": Job(3, missing_gradient_on_one_rank),
    "replicas that disagree": Job(3, replicas_that_disagree),
}


# Cases that have hung: each in processes of its own, which a test can end.
ALONE: dict[str, Job] = {"meshes over some ranks": Job(4, meshes_over_some_ranks)}


def run_job(job: Job, rank: int, store: str) -> str:
    """What went wrong, or nothing."""
    try:
        files = dist.FileStore(store, job.world)
        dist.init_process_group("gloo", rank=rank, world_size=job.world, store=files, timeout=timedelta(seconds=8))
        job.run()
    except BaseException:
        return traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return ""


def run_rank(rank: int, folder: str, together: Any) -> None:
    """All cases in turn, each in a fresh process group; a case's failure is its own."""
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    for number, (name, job) in enumerate(JOBS.items()):
        together.wait(250)
        if rank < job.world:
            found[name] = run_job(job, rank, f"{folder}/store{number}")
    torch.save(found, Path(folder) / f"rank{rank}.pt")


def run_all(folder: Path) -> list[dict[str, str]]:
    """What each rank says of each of its cases: nothing when it passed, else the traceback."""
    mp.spawn(run_rank, args=(str(folder), mp.get_context("spawn").Barrier(MOST)), nprocs=MOST)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(MOST)]


def run_rank_alone(rank: int, name: str, folder: str, ready: Any) -> None:
    torch.set_num_threads(1)
    ready.wait(250)
    text = run_job(ALONE[name], rank, f"{folder}/store")
    (Path(folder) / f"rank{rank}.txt").write_text(text)


def run_alone(name: str, folder: Path, seconds: float) -> list[str]:
    """What each rank says of one case; a rank that takes longer than ``seconds`` hangs."""
    context = mp.get_context("spawn")
    world = ALONE[name].world
    ready = context.Barrier(world + 1)
    ranks = [context.Process(target=run_rank_alone, args=(rank, name, str(folder), ready), daemon=True) for rank in range(world)]
    for one in ranks:
        one.start()
    ready.wait(250)  # imports are over
    end = time.monotonic() + seconds
    for one in ranks:
        one.join(max(0.0, end - time.monotonic()))
    hung = [one.is_alive() for one in ranks]
    for one in ranks:
        one.kill()
        one.join()
    return ["hangs" if hung[rank] else (folder / f"rank{rank}.txt").read_text() for rank in range(world)]
