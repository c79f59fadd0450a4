"""What users change between steps, refused on all ranks. What they may change is in ``test_random_events.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from meshmuon import Muon
from tests.support.small_model import S1, give_gradients, initial, muon_of, on_mesh, world_mesh
from tests.support.tensors import like, one_text, refused, seeded
from tests.support.threads import run_threads

WORLD, ODD = 3, 1
LAYOUTS = ("DTensors", "plain tensors")


def build(layout: str) -> tuple[DeviceMesh | None, list[nn.Parameter], Muon]:
    """This rank's part of the model: shards, or replicas whose work is divided."""
    if layout == "DTensors":
        mesh = world_mesh()
        params = initial(mesh)
        return mesh, params, muon_of(params)
    params = initial(None)
    return None, params, muon_of(params, replica_group=dist.group.WORLD)


def give_data(param: nn.Parameter, value: Tensor) -> None:
    """``p.data = value``; of a DTensor torch would change the outside only, so that it is swapped as a whole."""
    if isinstance(param, DTensor):
        torch.utils.swap_tensors(param, nn.Parameter(value))
    else:
        param.grad = None
        param.data = value


# Other data.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["all ranks", "one rank"])
@pytest.mark.parametrize("k", [0, 5], ids=["Muon", "AdamW"])
def test_other_data_of_another_shape(layout: str, where: str, k: int) -> None:
    def main(rank: int) -> str:
        mesh, params, optimizer = build(layout)
        give_gradients(params, 0)
        optimizer.step()
        give_gradients(params, 1)
        if where == "all ranks" or rank == ODD:
            other = on_mesh(torch.ones(*params[k].shape[:-1], params[k].shape[-1] + 1), mesh)
            give_data(params[k], other)
            params[k].grad = torch.ones_like(other)
        return refused(optimizer)

    text = one_text(run_threads(WORLD, main))
    assert text.startswith(f"StateError: rank {0 if where == 'all ranks' else ODD}: {'abcdef'[k]} is now")
    assert "Build a new optimizer" in text


# Other shards.


@pytest.mark.parametrize("where", ["all ranks", "one rank"])
@pytest.mark.parametrize("how", ["other dim", "replicated", "plain"])
def test_sharded_anew_between_steps(where: str, how: str) -> None:
    def turned(value: Tensor, mesh: DeviceMesh) -> Tensor:
        placements: dict[str, Any] = {"other dim": [S1], "replicated": [torch.distributed.tensor.Replicate()]}
        return value if how == "plain" else distribute_tensor(value, mesh, placements[how], src_data_rank=None)

    def main(rank: int) -> str:
        mesh, params, optimizer = build("DTensors")
        assert mesh is not None
        give_gradients(params, 0)
        optimizer.step()
        give_gradients(params, 1)
        if where == "all ranks" or rank == ODD:
            state = optimizer.state.pop(params[0])
            # as a wrapper does that puts others in their place
            params[0] = nn.Parameter(turned(seeded((8, 6), 0), mesh))
            params[0].grad = like(params[0], seeded((8, 6), 9))
            optimizer.param_groups[0]["params"][0] = params[0]
            optimizer.state[params[0]] = state
        return refused(optimizer)

    text = one_text(run_threads(WORLD, main))
    assert text.startswith(f"StateError: rank {0 if where == 'all ranks' else ODD}: a is now (8, 6)")
    assert "Build a new optimizer after resharding" in text
