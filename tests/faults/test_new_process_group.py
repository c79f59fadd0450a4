"""A process group that is destroyed and followed by another: no optimizer steps on over what is left of the old one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from meshmuon import DistMuon, Muon, clip_grad_norm_
from meshmuon.errors import MeshmuonError
from tests.support.processes import join_group, results_of, run_ranks
from tests.support.small_model import (
    S0,
    SHAPES,
    R,
    after,
    assert_equal,
    give_gradients,
    initial,
    muon_of,
    run_steps,
    world_mesh,
)
from tests.support.tensors import local, one_text, refused, seeded

WORLD = 2
MATRICES = SHAPES[:-1]


def built(layout: str) -> tuple[list[nn.Parameter], Muon]:
    if layout == "two axes":
        mesh = init_device_mesh("cpu", (1, 2))
        params = [
            nn.Parameter(distribute_tensor(seeded(s, k), mesh, [R, S0], src_data_rank=None))
            for k, s in enumerate(SHAPES)
        ]
        return params, muon_of(params)
    if layout == "DTensors":
        params = initial(world_mesh())
        return params, muon_of(params)
    params = initial(None, MATRICES)
    if layout == "DistMuon":
        return params, DistMuon(params, lr=0.01)
    group = dist.new_group(list(range(WORLD))) if layout == "own group" else dist.group.WORLD
    return params, muon_of(params, replica_group=group)


def reborn_rank(rank: int, folder: Path, layout: str, stepped: bool, renewed: bool) -> list[str]:
    params, optimizer = built(layout)
    give_gradients(params, 0)
    if stepped:
        optimizer.step()
    give_gradients(params, 1)
    dist.destroy_process_group()
    if renewed:
        join_group(rank, WORLD, folder / "again")
    said = [refused(optimizer), refused(optimizer)]
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(3, 3)))], "use_muon": True})
    return [*said, refused(optimizer)]


LAYOUTS = ["DTensors", "two axes", "whole world", "own group", "DistMuon"]


@pytest.mark.parametrize("renewed", [True, False], ids=["then another", "and no other"])
@pytest.mark.parametrize("stepped", [True, False], ids=["stepped", "not stepped"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_of_an_earlier_process_group(layout: str, stepped: bool, renewed: bool, tmp_path: Path) -> None:
    said = results_of(run_ranks(WORLD, reborn_rank, tmp_path, layout, stepped, renewed))
    text = one_text([text for texts in said for text in texts])
    assert text.startswith(
        "TransportError: ranks lost each other in the agreement of a step: destroy_process_group() has ended"
    )
    assert ("Rebuild the meshes" if layout in ("DTensors", "two axes") else "Set optimizer.replica_group") in text


def continued_rank(rank: int, folder: Path, layout: str) -> str:
    """All that the error advises: the run is then that of one device."""
    params, optimizer = built(layout)
    run_steps(params, optimizer, range(2))
    if isinstance(optimizer, DistMuon):
        optimizer.consolidate()
    values, saved = [local(param) for param in params], optimizer.state_dict()
    dist.destroy_process_group()
    join_group(rank, WORLD, folder / "again")
    give_gradients(params, 2)
    text = refused(optimizer)
    if layout == "DTensors":
        params, optimizer = built(layout)
        for param, value, entry in zip(params, values, saved["state"].values(), strict=True):
            param.detach().to_local().copy_(value)
            # the parts of the old mesh on the new one
            for key in entry.keys() & {"momentum_buffer", "exp_avg", "exp_avg_sq"}:
                part, stride = entry[key].to_local(), param.stride()
                mesh, placements = param.device_mesh, param.placements
                entry[key] = DTensor.from_local(
                    part, mesh, placements, run_check=False, shape=param.shape, stride=stride
                )
        optimizer.load_state_dict(saved)
    else:
        optimizer.replica_group = dist.group.WORLD
    run_steps(params, optimizer, (2, 3))
    shapes = SHAPES if layout == "DTensors" else MATRICES
    if layout == "DistMuon":
        reference = initial(None, shapes)
        alone = DistMuon(reference, lr=0.01)
        alone.replica_group = None
        run_steps(reference, alone, range(4))
        assert_equal(params, [param.detach() for param in reference])
    else:
        assert_equal(params, after(4, shapes))
    return text


@pytest.mark.parametrize("layout", ["DTensors", "whole world", "DistMuon"])
def test_what_the_error_advises(layout: str, tmp_path: Path) -> None:
    results_of(run_ranks(WORLD, continued_rank, tmp_path, layout))


def divided_rank(rank: int, folder: Path) -> str:
    params, optimizer = built("DistMuon")
    give_gradients(params, 0)
    optimizer.step()
    dist.destroy_process_group()
    join_group(rank, WORLD, folder / "again")
    optimizer.replica_group = dist.group.WORLD
    give_gradients(params, 1)
    return refused(optimizer)


def test_momentum_that_was_divided_over_an_earlier_group(tmp_path: Path) -> None:
    """Whoever owns a matrix in the new group would begin with none."""
    text = one_text(results_of(run_ranks(WORLD, divided_rank, tmp_path)))
    assert text.startswith("StateError: rank 0: momentum is divided over the owners of an earlier process group")


def alone_rank(rank: int, folder: Path) -> None:
    """Plain tensors of each rank's own need no group, neither the old one nor any."""
    params = initial(None)
    optimizer = muon_of(params)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
        if step == 0:
            dist.destroy_process_group()
        if step == 1:
            join_group(rank, WORLD, folder / "again")
    assert_equal(params, after(3))


def test_ranks_that_step_alone_go_on(tmp_path: Path) -> None:
    results_of(run_ranks(WORLD, alone_rank, tmp_path))


def clipped_rank(rank: int, folder: Path) -> Any:
    params, _ = built("two axes")
    give_gradients(params, 0)
    dist.destroy_process_group()
    join_group(rank, WORLD, folder / "again")
    with pytest.raises(MeshmuonError) as caught:
        clip_grad_norm_(params, 1.0)
    return type(caught.value).__name__, str(caught.value)


def test_clipping_on_a_mesh_of_an_earlier_group(tmp_path: Path) -> None:
    for kind, text in results_of(run_ranks(WORLD, clipped_rank, tmp_path)):
        assert kind == "TransportError"
        assert "After destroy_process_group(), rebuild meshes and model" in text
