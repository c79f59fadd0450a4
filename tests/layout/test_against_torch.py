"""Every layout against torch's DTensor: the same elements, on the same ranks, in the same order."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.layouts import Case, distribute, random_case, select, split

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
    # plain first
    assert sum(isinstance(one.case.placements[0], Shard) and bool(strided[k]) for k, one in enumerate(known)) > 50
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
