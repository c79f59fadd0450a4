"""Several meshes in one model: the ranks that they connect take one exchange per wave and direction, and wait for
no others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import Muon
from meshmuon.plan import NO_WAVE, Plan
from tests.support.cases import Case, Param, check, single
from tests.support.counting import Wire, counted
from tests.support.threads import run_threads

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
FSDP_OF_TP = _StridedShard(0, split_factor=2)
STEPS = 2
WORLD = 8
pytestmark = pytest.mark.filterwarnings("ignore:Slicing a flattened dim")  # what older trainers do
VISION, LANGUAGE, EXPERTS = 0, 1, 2  # indices of the meshes

# Shapes of the three parts of the model. Experts are cut inside, so that they travel as well.
SHAPES = {
    VISION: [(16, 6), (9, 8), (6, 11)],
    LANGUAGE: [(16, 8), (8, 12), (10, 10), (12, 8)],
    EXPERTS: [(4, 8, 6), (4, 6, 8)],
}


def named_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))


def one_mesh() -> list[DeviceMesh]:
    """What the others are compared with."""
    return [init_device_mesh("cpu", (WORLD,))] * 3


def separate() -> list[DeviceMesh]:
    """Three meshes that know nothing of each other."""
    ranks = torch.arange(WORLD)
    return [DeviceMesh("cpu", ranks), DeviceMesh("cpu", ranks.reshape(4, 2)), DeviceMesh("cpu", ranks.reshape(2, 4))]


def flattened() -> list[DeviceMesh]:
    """As trainers build them: axes of one mesh, flattened for each part of the model."""
    mesh = named_mesh()
    everyone = mesh._flatten("everyone")
    mesh["dp", "cp"]._flatten("fsdp")
    mesh["cp", "tp"]._flatten("ep")
    return [everyone, mesh["fsdp", "tp"], mesh["dp", "ep"]]


def unflattened() -> list[DeviceMesh]:
    """As torchtitan builds them: one axis of all ranks, cut anew for each part of the model."""
    world = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("world",))
    return [world, world._unflatten(0, (4, 2), ("fsdp", "tp")), world._unflatten(0, (2, 4), ("efsdp", "ep"))]


def sliced() -> list[DeviceMesh]:
    """Experts on one axis alone: each of its slices has experts of its own."""
    mesh = named_mesh()
    ep = mesh["cp", "tp"]._flatten("ep")
    fsdp = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
    return [mesh._flatten("everyone"), fsdp, ep]


Placements = dict[int, tuple[Any, ...]]
MESHES: dict[str, tuple[Callable[[], list[DeviceMesh]], Placements]] = {
    "one mesh": (one_mesh, {VISION: (S0,), LANGUAGE: (S0,), EXPERTS: (S1,)}),
    "separate": (separate, {VISION: (S0,), LANGUAGE: (S0, S1), EXPERTS: (S1, S0)}),
    "separate, FSDP over TP": (separate, {VISION: (S0,), LANGUAGE: (FSDP_OF_TP, S0), EXPERTS: (S2, S0)}),
    "flattened": (flattened, {VISION: (S0,), LANGUAGE: (S0, S1), EXPERTS: (S1, S0)}),
    "unflattened": (unflattened, {VISION: (S0,), LANGUAGE: (S0, S1), EXPERTS: (S1, S0)}),
    "slices of an ep axis": (sliced, {VISION: (S1,), LANGUAGE: (R, S0), EXPERTS: (S1,)}),
}


def model(placements: Placements, **options: Any) -> Case:
    params = [Param(shape, mesh, placements[mesh]) for mesh, shapes in SHAPES.items() for shape in shapes]
    return Case((*params, Param((11,), VISION, (S0,), muon=False)), options, STEPS)


def on_threads(case: Case, meshes: Callable[[], list[DeviceMesh]]) -> tuple[Wire, Plan]:
    """Runs a case on all ranks, which must end with the bits of one device; each sends what the plan says."""
    expected = single(case)
    with counted() as wire:
        plans = run_threads(WORLD, lambda rank: check(case, meshes(), expected, watch=wire.watch).plan())
    assert len({plan.digest for plan in plans}) == 1
    for rank in range(WORLD):
        wire.check(rank)
    return wire, plans[0]


@pytest.mark.parametrize("name", MESHES)
def test_three_meshes_take_one_exchange_per_direction(name: str) -> None:
    meshes, placements = MESHES[name]
    wire, plan = on_threads(model(placements), meshes)
    assert plan.ranks == tuple(range(WORLD))
    assert {task.param for task in plan.tasks if task.wave != NO_WAVE} == set(range(9)), (
        "some part of the model does not travel"
    )
    assert wire.calls == dict.fromkeys(range(WORLD), STEPS * 2)


@pytest.mark.parametrize(("budget", "waves"), [(1, 3), (2 * 512, 2), (3 * 512, 1)])
@pytest.mark.parametrize("name", ["one mesh", "unflattened"])
def test_as_many_waves_as_on_one_mesh_also_when_memory_is_short(name: str, budget: int, waves: int) -> None:
    """24 matrices of 512 bytes on 8 ranks: however they lie, each rank can own 3, and waves follow from the longest
    queue.

    With other shapes the numbers may differ by a wave in either direction: a mesh also decides who may own a matrix,
    and a rank that must own one more has the longest queue.
    """
    meshes, placements = MESHES[name]
    shapes = {VISION: [(16, 8)] * 6, LANGUAGE: [(16, 8)] * 10, EXPERTS: [(8, 16, 8)]}
    params = tuple(Param(shape, mesh, placements[mesh]) for mesh, some in shapes.items() for shape in some)
    wire, plan = on_threads(Case(params, {"memory_budget": budget}, 1), meshes)
    assert len(plan.wave_lanes) == waves
    assert wire.calls == dict.fromkeys(range(WORLD), 2 * waves)


# Pipeline stages.

STAGES = (
    Case((Param((7, 5), 0, (S0,)), Param((6, 4), 0, (S1,)), Param((3, 6, 5), 0, (S1,))), {}, 5),
    Case((Param((5, 9), 0, (S0,)), Param((8, 2), 0, (R,)), Param((5, 4), 0, (S0,))), {"replicas": "share"}, 2),
)


def stage_meshes() -> DeviceMesh:
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    return meshes[dist.get_rank() // 2]


def slice_of_a_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]


def run_stages(
    world: int, meshes: Callable[[], Sequence[DeviceMesh]], stages: Sequence[Case], first: int
) -> list[Muon]:
    """Two stages; not one rank of the other begins its first step before all ranks of stage ``first`` have done
    their last.
    """
    expected = [single(case) for case in stages]
    done = threading.Barrier(world, timeout=100)

    def main(rank: int) -> Muon:
        mine, stage = meshes(), rank * 2 // world
        if stage != first:
            done.wait()
        optimizer = check(stages[stage], mine, expected[stage], watch=wire.watch)
        if stage == first:
            done.wait()
        return optimizer

    with counted() as wire:
        optimizers = run_threads(world, main)
    for rank, optimizer in enumerate(optimizers):
        wire.check(rank)
        assert optimizer.plan().wave_lanes
        assert wire.calls[rank] == stages[rank * 2 // world].steps * 2 * len(optimizer.plan().wave_lanes)
    return optimizers


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("mesh", [stage_meshes, slice_of_a_mesh])
def test_a_pipeline_stage_plans_over_its_own_ranks_and_waits_for_no_other(
    mesh: Callable[[], DeviceMesh], first: int
) -> None:
    optimizers = run_stages(4, lambda: [mesh()], STAGES, first)
    assert [one.plan().ranks for one in optimizers] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [len(one.plan().params) for one in optimizers] == [3] * 4
    assert len({one.plan().digest for one in optimizers}) == 2


@pytest.mark.parametrize("first", [0, 1])
def test_a_stage_with_meshes_of_its_own_makes_its_group_without_the_other(first: int) -> None:
    """Each stage has parameters on its dp axis and others on its tp axis; no process group has just its four ranks
    yet.
    """
    stages = (
        Case((Param((7, 5), 0, (S0,)), Param((6, 4), 1, (S1,)), Param((3, 6, 5), 1, (S1,))), {}, 4),
        Case((Param((5, 9), 1, (S0,)), Param((9, 3), 0, (S0,))), {}, 2),
    )

    def meshes() -> list[DeviceMesh]:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        return [mesh["dp"], mesh["tp"]]

    optimizers = run_stages(8, meshes, stages, first)
    assert [one.plan().ranks for one in optimizers] == [(0, 1, 2, 3)] * 4 + [(4, 5, 6, 7)] * 4
