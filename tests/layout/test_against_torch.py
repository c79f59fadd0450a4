"""Every layout against torch's DTensor: the same elements, on the same ranks, in the same order."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon.layout import Mesh
from tests.support.layouts import Case, distribute, random_case, select, split
from tests.support.threads import run_threads

LAYOUTS = 1000


@dataclass(frozen=True)
class Known:
    """A case and the local tensor of every rank of the world, also of those outside its mesh."""

    case: Case
    held: dict[int, torch.Tensor]

    def __str__(self) -> str:
        return f"{self.case.shape} as {self.case.placements} on {self.case.mesh}"


@pytest.fixture(scope="module")
def known() -> list[Known]:
    rng = random.Random(2048)
    cases = [random_case(rng) for _ in range(LAYOUTS)]
    return [Known(case, held) for case, held in zip(cases, distribute(cases), strict=True)]


def test_enough_layouts_of_every_kind(known: list[Known]) -> None:
    assert len({(one.case.shape, one.case.mesh, one.case.placements) for one in known}) >= 500
    layouts = [one.case.layout for one in known]
    dims = [[axes for dim in range(len(layout.shape)) if (axes := layout.axes(dim))] for layout in layouts]
    strided = [[one for one in known_.case.placements if isinstance(one, _StridedShard)] for known_ in known]
    sizes = [{one.held[rank].numel() for rank in one.case.mesh.ranks} for one in known]
    assert sum(any(len(axes) > 1 for axes in one) for one in dims) > 100  # several axes share a dim
    assert sum(len(one) > 1 for one in dims) > 30  # several dims sharded
    assert sum(any(one.split_factor > 1 for one in many) for many in strided) > 150
    assert sum(isinstance(one.case.placements[0], Shard) and bool(strided[k]) for k, one in enumerate(known)) > 50  # plain first
    assert sum(len(one) > 1 for one in sizes) > 150  # uneven
    assert sum(0 in one and len(one) > 1 for one in sizes) > 100  # some ranks hold nothing
    assert sum(one == {0} for one in sizes) > 20  # a tensor without elements
    assert sum(one.mesh.ranks != tuple(sorted(one.mesh.ranks)) for one in layouts) > 100
    assert {len(one.shape) for one in layouts} == {1, 2, 3, 4}
    assert {len(one.mesh.shape) for one in layouts} == {1, 2, 3}


def test_local_tensors(known: list[Known]) -> None:
    compared = 0
    for one in known:
        layout, whole = one.case.layout, one.case.tensor
        for rank in layout.mesh.ranks:
            assert layout.local_shape(rank) == tuple(one.held[rank].shape), f"{one}, rank {rank}"
            assert torch.equal(select(whole, layout.held_ranges(rank)), one.held[rank]), f"{one}, rank {rank}"
        compared += 1
    assert compared >= 500


def test_ranks_outside_the_mesh_hold_nothing(known: list[Known]) -> None:
    outside = 0
    for one in known:
        layout = one.case.layout
        for rank in one.held.keys() - set(layout.mesh.ranks):
            assert one.held[rank].numel() == 0
            assert layout.local_shape(rank) == (0,) * len(layout.shape)
            outside += 1
    assert outside >= 500


def test_holders(known: list[Known]) -> None:
    compared = 0
    for one in known:
        layout, whole = one.case.layout, one.case.tensor
        expected: dict[int, list[int]] = {}
        for rank in layout.mesh.ranks:
            for element in one.held[rank].flatten().tolist():
                expected.setdefault(element, []).append(rank)
        found: dict[int, list[int]] = {}
        for held, ranks in layout.holders().items():
            for element in select(whole, held).flatten().tolist():
                assert element not in found, f"{one}: element {element} is held in two ways"
                found[element] = ranks
        assert found == expected, str(one)
        holding = {rank for rank in layout.mesh.ranks if one.held[rank].numel()}
        assert {rank for ranks in layout.holders().values() for rank in ranks} == holding, str(one)
        compared += 1
    assert compared >= 500


def test_splitting_alone_is_what_distribute_tensor_does(known: list[Known]) -> None:
    """The other tests of this folder take torch's splitting as their oracle, which needs no process group."""
    for one in known:
        for rank, tensor in split(one.case).items():
            assert torch.equal(tensor, one.held[rank]), f"{one}, rank {rank}"


def test_with_communication() -> None:
    """``distribute_tensor`` that scatters from the first rank, on threads that are ranks.

    Left out, and in the other tests: strided shardings into parts of different sizes, which torch refuses to scatter (it asserts
    that all are alike), and meshes whose ranks do not ascend along every axis, where torch scatters in the order of the process
    group, which is sorted, and so against its own mesh.
    """
    size, rng = 8, random.Random(1)
    order = tuple(range(size))
    meshes = [Mesh(shape, order) for shape in [(8,), (2, 4), (2, 2, 2)]] + [Mesh((4, 2), (0, 4, 1, 5, 2, 6, 3, 7))]
    cases: list[Case] = []
    while len(cases) < 200:
        case = random_case(rng, rng.choice(meshes))
        case = replace(case, shape=tuple(length * rng.choice([1, 1, 4, 8]) for length in case.shape))
        strided = any(isinstance(one, _StridedShard) and one.split_factor > 1 for one in case.placements)
        if math.prod(case.shape) and strided == bool(len(cases) % 2) and _scatters(case):
            cases.append(case)
    assert sum(len({tuple(tensor.shape) for tensor in split(case).values()}) > 1 for case in cases) > 30
    held: list[dict[int, torch.Tensor]] = [{} for _ in cases]

    def run(rank: int) -> None:
        theirs = {mesh: DeviceMesh("cpu", torch.tensor(mesh.ranks).reshape(mesh.shape)) for mesh in meshes}
        for case, locals_ in zip(cases, held, strict=True):
            mine = case.tensor if rank == case.mesh.ranks[0] else torch.full(case.shape, -1)
            locals_[rank] = distribute_tensor(mine, theirs[case.mesh], case.placements).to_local()

    run_threads(size, run)
    for case, locals_ in zip(cases, held, strict=True):
        for rank in range(size):
            assert torch.equal(select(case.tensor, case.layout.held_ranges(rank)), locals_[rank]), f"{case}, rank {rank}"


def _scatters(case: Case) -> bool:
    """Whether every strided axis cuts into parts of one size."""
    for axis, one in enumerate(case.placements):
        if isinstance(one, _StridedShard):
            after = tuple(Replicate() for _ in case.placements[axis + 1 :])
            sizes: dict[object, set[torch.Size]] = {}
            where = torch.cartesian_prod(*(torch.arange(n) for n in case.mesh.shape)).reshape(-1, len(case.mesh.shape)).tolist()
            tensors = split(Case(case.shape, case.mesh, (*case.placements[: axis + 1], *after))).values()
            for place, tensor in zip(where, tensors, strict=True):
                sizes.setdefault(tuple(place[:axis]), set()).add(tensor.shape)
            if any(len(shapes) > 1 for shapes in sizes.values()):
                return False
    return True
